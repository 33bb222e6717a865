"""What a family is, and how a GGUF checkpoint of one becomes a `ModelConfig`."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..checkpoints.gguf import GGUFCheckpoint
from ..checkpoints.gguf_blocks import convert
from ..config import ModelConfig, Rope
from ..errors import StokerError
from ..parameters import abstract_params, named_parameters

#: Parameter to GGUF tensor; `{layer}` stands for the number of a layer.
DECODER_TENSORS: Mapping[str, str] = types.MappingProxyType(
    {
        "embedding": "token_embd.weight",
        "final_norm": "output_norm.weight",
        "head": "output.weight",
        "attn_norm": "blk.{layer}.attn_norm.weight",
        "q": "blk.{layer}.attn_q.weight",
        "k": "blk.{layer}.attn_k.weight",
        "v": "blk.{layer}.attn_v.weight",
        "o": "blk.{layer}.attn_output.weight",
        "mlp_norm": "blk.{layer}.ffn_norm.weight",
        "gate": "blk.{layer}.ffn_gate.weight",
        "up": "blk.{layer}.ffn_up.weight",
        "down": "blk.{layer}.ffn_down.weight",
    }
)
BIAS_TENSORS: Mapping[str, str] = types.MappingProxyType(
    {f"{part}_bias": f"blk.{{layer}}.attn_{part}.bias" for part in "qkv"}
)
#: A divisor for each rotary frequency; part of the configuration, not of the parameters.
ROPE_FACTORS = "rope_freqs.weight"
#: Keys (after the architecture) that change the arithmetic, and the one value that does not.
_NEUTRAL: Mapping[str, Any] = types.MappingProxyType(
    {
        "expert_count": 0,
        "attention.causal": True,
        "attention.clamp_kqv": 0.0,
        "attention.max_alibi_bias": 0.0,
        "attention.scale": 0.0,
        "attention.temperature_scale": 0.0,
        "attn_logit_softcapping": 0.0,
        "final_logit_softcapping": 0.0,
        "embedding_scale": 1.0,
        "logit_scale": 1.0,
        "residual_scale": 1.0,
        "rope.scaling.attn_factor": 1.0,
        "use_parallel_residual": False,
    }
)


@dataclasses.dataclass(frozen=True)
class Family:
    """Models that one mapping of names loads.

    Attributes:
      name: the family's own name, `ModelConfig.family`.
      architecture: what GGUF files call it; the prefix of their keys.
      tensors: parameter names (of one layer, or of the whole model) to GGUF tensor names.
      paired_rows: parameters whose rows, in a GGUF file, lie in rotated pairs (2i, 2i + 1) rather
        than as (i, i + dims/2).
      activation: of the MLP's gate.
    """

    name: str
    architecture: str
    tensors: Mapping[str, str]
    paired_rows: tuple[str, ...] = ()
    activation: str = "silu"

    def config(self, checkpoint: GGUFCheckpoint) -> ModelConfig:
        """The checkpoint's architecture, from its metadata and the shapes of its tensors.

        Raises `StokerError` naming the key or tensor that is missing or unsupported.
        """
        keys = _Keys(checkpoint.metadata, self.architecture)
        keys.check_neutral()
        layers, positions = keys.integer("block_count"), keys.integer("context_length")
        if layers > len(checkpoint.tensors):
            raise StokerError(
                f"{keys.name('block_count')} is {layers} but the file has only "
                f"{len(checkpoint.tensors)} tensors; it is damaged: download it again"
            )
        window = keys.integer("attention.sliding_window", 0)
        if 0 < window < positions:
            raise StokerError(
                f"{keys.name('attention.sliding_window')} is {window}, but attention windows are "
                "not supported; give a model that attends to its whole context"
            )
        d_model, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
        if heads < 1:
            raise StokerError(f"{keys.name('attention.head_count')} must be at least 1")
        head_dim = keys.integer("attention.key_length", d_model // heads)
        if keys.integer("attention.value_length", head_dim) != head_dim:
            raise StokerError(
                f"{keys.name('attention.value_length')} differs from the key width {head_dim}, "
                "which is not supported; give a model whose heads have one width"
            )
        embedding = self.tensors["embedding"]
        if embedding not in checkpoint.tensors:
            raise StokerError(f"tensor '{embedding}' is missing; give a complete checkpoint")
        return ModelConfig(
            family=self.name,
            vocab_size=checkpoint.tensors[embedding].shape[0],
            d_model=d_model,
            n_layers=layers,
            n_heads=heads,
            n_kv_heads=keys.integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            d_ff=keys.integer("feed_forward_length"),
            max_positions=positions,
            norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
            rope=Rope(
                theta=keys.number("rope.freq_base", 10000.0),
                dims=keys.integer("rope.dimension_count", head_dim),
                scale=keys.rope_scale(),
                factors=_rope_factors(checkpoint),
            ),
            tied_head=self.tensors["head"] not in checkpoint.tensors,
            # One of the three in one layer is enough: the others are then missed by name.
            attention_bias=any(
                self.tensors[bias].format(layer=layer) in checkpoint.tensors
                for layer in range(layers)
                for bias in BIAS_TENSORS
            ),
            activation=self.activation,
        )

    def tensor_names(self, config: ModelConfig) -> dict[str, str]:
        """The GGUF tensor of each parameter of `abstract_params(config)`."""
        names = {}
        for path, _ in named_parameters(abstract_params(config)):
            *_, layer, parameter = ("", "", *path.split("."))
            names[path] = self.tensors[parameter].format(layer=layer)
        return names

    def row_order(self, parameter: str, config: ModelConfig) -> np.ndarray | None:
        """Which file row each row of a parameter is, int32 `[rows]`; None where none moves.

        Args:
          parameter: a dotted path of `abstract_params(config)`.
          config: of the model.
        """
        part = parameter.rpartition(".")[2]
        if part not in self.paired_rows:
            return None
        heads = config.n_heads if part.startswith("q") else config.n_kv_heads
        head = np.arange(config.head_dim, dtype=np.int32)
        rotated = head[: config.rope.dims].reshape(-1, 2).T.reshape(-1)
        head = np.concatenate([rotated, head[config.rope.dims :]])
        starts = np.arange(heads, dtype=np.int32) * np.int32(config.head_dim)
        return (starts[:, None] + head).reshape(-1)


def _rope_factors(checkpoint: GGUFCheckpoint) -> tuple[float, ...]:
    info = checkpoint.tensors.get(ROPE_FACTORS)
    if info is None:
        return ()
    if info.type.name != "F32" or len(info.shape) != 1 or info.nbytes > 1 << 16:
        raise StokerError(
            f"tensor '{ROPE_FACTORS}' is {info.type.name} of shape {list(info.shape)}, not a short "
            "F32 vector; convert the model again"
        )
    return tuple(np.asarray(convert(checkpoint.read(ROPE_FACTORS), info)).tolist())


class _Keys:
    """Typed look-ups of `<architecture>.<key>`."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self.metadata, self.architecture = metadata, architecture

    def name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def value(self, key: str, default: Any) -> Any:
        value = self.metadata.get(self.name(key), default)
        if value is None:
            raise StokerError(
                f"metadata key '{self.name(key)}' is missing; convert the model again"
            )
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.value(key, default)
        if type(value) is not int or value < 0:
            raise StokerError(f"'{self.name(key)}' must be one whole number, not {value!r:.40}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.value(key, default)
        if type(value) not in (int, float):
            raise StokerError(f"'{self.name(key)}' must be a number, not {value!r:.40}")
        return float(value)

    def check_neutral(self) -> None:
        for key, value in self._unsupported():
            raise StokerError(
                f"'{self.name(key)}' is {value!r:.40}, which is not supported; give a model "
                "without it"
            )

    def _unsupported(self) -> Iterator[tuple[str, Any]]:
        for key, neutral in _NEUTRAL.items():
            value = self.metadata.get(self.name(key), neutral)
            if value != neutral:
                yield key, value

    def rope_scale(self) -> float:
        """The factor of linear scaling, 1 for none; other kinds raise `StokerError`.

        A factor without a kind means linear scaling, as in files older than the key.
        """
        factor = "rope.scaling.factor"
        if self.name(factor) not in self.metadata:
            factor = "rope.scale_linear"
        kind = self.value("rope.scaling.type", "unstated")
        if kind == "none":
            return 1.0
        if kind == "unstated":
            return self.number(factor, 1.0) or 1.0
        if kind == "linear":
            return self.number(factor)
        raise StokerError(
            f"'{self.name('rope.scaling.type')}' is {kind!r:.40}, which is not supported; give a "
            "model with linear scaling or none"
        )
