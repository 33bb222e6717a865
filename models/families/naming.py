"""What checkpoints call the parameters, and how a tensor becomes one."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Collection, Container, Mapping
from typing import Any

import numpy as np

from ..config import ModelConfig
from ..parameters import abstract_params, named_parameters

_HF_LAYER = "model.layers.{layer}."
#: Parameter to tensor in the files of Hugging Face, for what is built like Llama; `{layer}` stands
#: for the number of a layer, `{expert}` for that of an expert whose matrix is a tensor of its own.
HF_TENSORS: Mapping[str, str] = types.MappingProxyType(
    {
        "embedding": "model.embed_tokens.weight",
        "final_norm": "model.norm.weight",
        "head": "lm_head.weight",
        "attn_norm": f"{_HF_LAYER}input_layernorm.weight",
        "mlp_norm": f"{_HF_LAYER}post_attention_layernorm.weight",
        **{name: f"{_HF_LAYER}self_attn.{name}_proj.weight" for name in "qkvo"},
        **{f"{name}_bias": f"{_HF_LAYER}self_attn.{name}_proj.bias" for name in "qkvo"},
        **{f"{name}_norm": f"{_HF_LAYER}self_attn.{name}_norm.weight" for name in "qk"},
        **{name: f"{_HF_LAYER}mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
        **{f"{name}_bias": f"{_HF_LAYER}mlp.{name}_proj.bias" for name in ("gate", "up", "down")},
        "router": f"{_HF_LAYER}mlp.gate.weight",
        **{
            f"expert_{name}": f"{_HF_LAYER}mlp.experts.{{expert}}.{name}_proj.weight"
            for name in ("gate", "up", "down")
        },
    }
)
#: The same with norms after attention and MLP (OLMo 2), and those before the MLP (Gemma 2 and 3).
HF_POST_NORMS: Mapping[str, str] = types.MappingProxyType(
    {
        "attn_post_norm": f"{_HF_LAYER}post_attention_layernorm.weight",
        "mlp_norm": f"{_HF_LAYER}pre_feedforward_layernorm.weight",
        "mlp_post_norm": f"{_HF_LAYER}post_feedforward_layernorm.weight",
    }
)
#: The same where transformers keeps all experts of a layer in one tensor, `[E, outputs, inputs]`,
#: as it does in memory and, if told to, in files.
HF_STACKED: Mapping[str, str] = types.MappingProxyType(
    {
        "router": f"{_HF_LAYER}mlp.gate.weight",
        "expert_gate": f"{_HF_LAYER}mlp.experts.gate_up_proj",
        "expert_up": f"{_HF_LAYER}mlp.experts.gate_up_proj",
        "expert_down": f"{_HF_LAYER}mlp.experts.down_proj",
    }
)
#: Parameter to tensor in GGUF files.
GGUF_TENSORS: Mapping[str, str] = types.MappingProxyType(
    {
        "embedding": "token_embd.weight",
        "final_norm": "output_norm.weight",
        "head": "output.weight",
        "attn_norm": "blk.{layer}.attn_norm.weight",
        "attn_post_norm": "blk.{layer}.post_attention_norm.weight",
        "mlp_norm": "blk.{layer}.ffn_norm.weight",
        "mlp_post_norm": "blk.{layer}.post_ffw_norm.weight",
        **{name: f"blk.{{layer}}.attn_{name}.weight" for name in "qkv"},
        "o": "blk.{layer}.attn_output.weight",
        **{f"{name}_bias": f"blk.{{layer}}.attn_{name}.bias" for name in "qkv"},
        "o_bias": "blk.{layer}.attn_output.bias",
        **{f"{name}_norm": f"blk.{{layer}}.attn_{name}_norm.weight" for name in "qk"},
        **{name: f"blk.{{layer}}.ffn_{name}.weight" for name in ("gate", "up", "down")},
        **{f"{name}_bias": f"blk.{{layer}}.ffn_{name}.bias" for name in ("gate", "up", "down")},
        "router": "blk.{layer}.ffn_gate_inp.weight",
        **{
            f"expert_{name}": f"blk.{{layer}}.ffn_{name}_exps.weight"
            for name in ("gate", "up", "down")
        },
    }
)
#: Parts of the configuration that GGUF files keep as tensors.
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
#: Tensors that no parameter needs: frequencies that follow from the configuration.
_HF_SPARE = (f"{_HF_LAYER}self_attn.rotary_emb.inv_freq",)
_GGUF_SPARE = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)
_NONE: Mapping[str, str] = types.MappingProxyType({})
#: The flags of `ModelConfig` that the presence of any of these parameters sets.
_BIASES = {
    "attention_bias": ("q_bias", "k_bias", "v_bias"),
    "output_bias": ("o_bias",),
    "mlp_bias": tuple(
        f"{one}{name}_bias" for one in ("", "expert_") for name in ("gate", "up", "down")
    ),
}


@dataclasses.dataclass(frozen=True)
class TensorUse:
    """How one parameter comes out of a tensor.

    Attributes:
      tensors: its name in the checkpoint; several of one shape are stacked.
      shape: of the whole tensor, or of each.
      rows: which of its rows are the parameter's.
      columns: which of its columns, or of each matrix's; None: all.
      added: what is added to each element.
      heads: the rows are those of so many heads, each of which gets a matrix of its own; 0: one
        matrix.
      transposed: each head's matrix is turned. A quantised one becomes dense, since its groups run
        along what were its columns.
      outputs: of a tensor `[E, outputs, ...]`, which outputs of each expert; None where the
        parameter is whole rows.
      turned_floats: tensors of floats are `[E, inputs, outputs]` (`shape` is of the others).
    """

    tensors: tuple[str, ...]
    shape: tuple[int, ...]
    rows: slice
    added: float = 0.0
    heads: int = 0
    transposed: bool = False
    outputs: slice | None = None
    turned_floats: bool = False
    columns: slice | None = None


@dataclasses.dataclass(frozen=True)
class Naming:
    """How the checkpoints of one format hold the parameters of a family.

    Attributes:
      tensors: parameter (of one layer, or of the whole model) to tensor. Parameters that share a
        tensor are its rows, one after another in the order of this mapping.
      paired_rows: parameters whose rows lie in rotated pairs (2i, 2i + 1) rather than as
        (i, i + dims/2).
      norm_offset: what is added to every norm (Gemma's checkpoints keep the weight less 1).
      spare: tensors that may be there and are not needed.
      transposed: parameters of experts whose floats are `[E, inputs, outputs]`.
      interleaved: parameters of experts that share a tensor take turns with its outputs.
    """

    tensors: Mapping[str, str]
    paired_rows: tuple[str, ...] = ()
    norm_offset: float = 0.0
    spare: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()
    interleaved: bool = False

    def presence(self, tensors: Container[str], n_layers: int) -> dict[str, Any]:
        """The fields of `ModelConfig` that the presence of tensors decides: biases and own head."""
        fields: dict[str, Any] = {"tied_head": self.tensors["head"] not in tensors}
        for field, biases in _BIASES.items():
            # One of them in one layer is enough: the others are then missed by name.
            fields[field] = any(
                self.tensors[bias].format(layer=layer) in tensors
                for layer in range(n_layers)
                for bias in biases
                if bias in self.tensors
            )
        return fields

    def fitting(self, tensors: Collection[str]) -> Naming:
        """The naming of a checkpoint with these tensors, where a format has several.

        Here `HF_STACKED`, where these names are for experts one by one and the files have them so.
        """
        ending = HF_STACKED["expert_gate"].rpartition("}")[2]
        one_by_one = "{expert}" in self.tensors["expert_gate"]
        if one_by_one and any(name.endswith(ending) for name in tensors):
            return dataclasses.replace(self, tensors={**self.tensors, **HF_STACKED})
        return self

    def unread(self, name: str, config: ModelConfig) -> bool:
        """Whether the tensor `name` belongs to a part of the model that is not loaded."""
        return False

    def uses(self, config: ModelConfig) -> dict[str, TensorUse]:
        """How each parameter of `abstract_params(config)`, by its dotted path, is made."""
        parameters = dict(named_parameters(abstract_params(config)))
        order = {name: place for place, name in enumerate(self.tensors)}
        paths = sorted(parameters, key=lambda path: order[path.rpartition(".")[2]])
        parts: dict[str, list[str]] = {}
        for path in paths:
            *_, layer, name = ("", "", *path.split("."))
            template = self.tensors[name].replace("{layer}", layer)
            parts.setdefault(template, []).append(path)
        uses: dict[str, TensorUse] = {}
        for template, sharing in parts.items():
            name = sharing[0].rpartition(".")[2]
            stacked = "{expert}" in template
            if not stacked and name.startswith("expert_"):
                uses |= self._experts(template, {path: parameters[path].shape for path in sharing})
                continue
            numbers = range(config.n_experts if stacked else 1)
            names = tuple(template.replace("{expert}", str(number)) for number in numbers)
            shapes = {path: parameters[path].shape[stacked:] for path in sharing}
            shape = (sum(shape[0] for shape in shapes.values()), *shapes[sharing[0]][1:])
            start = 0
            for path in sharing:
                end = start + shapes[path][0]
                added = self.norm_offset if path.endswith("norm") else 0.0
                uses[path] = TensorUse(names, shape, slice(start, end), added)
                start = end
        return {path: uses[path] for path in parameters}

    def _experts(self, tensor: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorUse]:
        """How the parameters of all experts of a layer come out of the one tensor they share."""
        total = sum(shape[1] for shape in shapes.values())
        uses: dict[str, TensorUse] = {}
        start = 0
        for number, (path, shape) in enumerate(shapes.items()):
            outputs = slice(start, start + shape[1])
            if self.interleaved:
                outputs = slice(number, total, len(shapes))
            start += shape[1]
            transposed = path.rpartition(".")[2] in self.transposed
            whole = len(shapes) == 1 and not transposed
            uses[path] = TensorUse(
                (tensor,),
                (shape[0], total, *shape[2:]),
                slice(0, shape[0]),
                outputs=None if whole else outputs,
                turned_floats=transposed,
            )
        return uses

    def spare_tensors(self, config: ModelConfig) -> set[str]:
        """Names that `spare` stands for."""
        return {name.format(layer=layer) for name in self.spare for layer in range(config.n_layers)}

    def row_order(self, path: str, config: ModelConfig) -> np.ndarray | None:
        """Which of the rows in the file each row of a parameter is, int32 `[rows]`; None: the same.

        Args:
          path: a dotted path of `abstract_params(config)`.
          config: of the model.
        """
        name = path.rpartition(".")[2]
        if name not in self.paired_rows:
            return None
        heads = config.n_heads if name.startswith("q") else config.n_kv_heads
        head = np.arange(config.head_dim, dtype=np.int32)
        rotated = head[: config.rope.dims].reshape(-1, 2).T.reshape(-1)
        head = np.concatenate([rotated, head[config.rope.dims :]])
        starts = np.arange(heads, dtype=np.int32) * np.int32(config.head_dim)
        return (starts[:, None] + head).reshape(-1)


def hf_naming(own: Mapping[str, str] = _NONE, *, norm_offset: float = 0.0) -> Naming:
    """The names of Hugging Face's files, as Llama has them but for `own`."""
    return Naming({**HF_TENSORS, **own}, norm_offset=norm_offset, spare=_HF_SPARE)


def gguf_naming(own: Mapping[str, str] = _NONE, *, paired: bool = False) -> Naming:
    """The names of GGUF files but for `own`; `paired` where the converter reorders Q and K."""
    rows = ("q", "k", "q_bias", "k_bias") if paired else ()
    return Naming({**GGUF_TENSORS, **own}, paired_rows=rows, spare=_GGUF_SPARE)
