"""What a checkpoint holds, from its headers alone: no tensor is read."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from typing import Any

import numpy as np

from ..config import ModelConfig
from ..families.gguf_config import Keys, read_config
from ..loading import Opened, check_tensors, naming_of, open_checkpoint
from ..pages import layer_token_bytes
from ..parameters import Parameter, abstract_params, named_parameters
from ..sources import resolve
from ..tokenizers.base import Tokenizer
from .config_json import config_to_json
from .gguf import GGUFCheckpoint
from .gguf_blocks import blocks_of, convert
from .gguf_header import TensorInfo
from .manifest import Stored
from .native import NativeCheckpoint
from .prequantised import QuantisedCheckpoint, QuantisedTensor
from .safetensors import StoredTensor

#: Parts of a model, in the order of a report.
GROUPS = ("embedding", "attention", "mlp", "experts", "norms and biases", "head")
_MLP = ("gate", "up", "down")


@dataclasses.dataclass(frozen=True)
class Part:
    """What some parameters take.

    Attributes:
      parameters: elements.
      active: of them, those that one token meets: of experts only the chosen ones.
      file_bytes: in the checkpoint.
      loaded_bytes: in memory.
    """

    parameters: int = 0
    active: int = 0
    file_bytes: int = 0
    loaded_bytes: int = 0

    def __add__(self, other: Part) -> Part:
        return Part(
            *(one + two for one, two in zip(*map(dataclasses.astuple, (self, other)), strict=True))
        )


@dataclasses.dataclass(frozen=True)
class Report:
    """What there is to say of a checkpoint.

    Attributes:
      name: as it was asked for.
      path: file or folder.
      format: for example "GGUF" or "safetensors, awq".
      files: how many.
      file_bytes: of all.
      config: the architecture.
      groups: by `GROUPS`, those that are there.
      types: tensors, and bytes in the checkpoint, by type.
      kv_token_bytes: that each token adds to the KV cache in bfloat16, in all layers.
      kv_context_bytes: of one sequence of the longest context, windows taken into account.
      tokenizer: kind, size, ids and chat template.
      unusual: remarks on what sets the model apart from a plain one, or is missing.
    """

    name: str
    path: str
    format: str
    files: int
    file_bytes: int
    config: ModelConfig
    groups: dict[str, Part]
    types: dict[str, tuple[int, int]]
    kv_token_bytes: int
    kv_context_bytes: int
    tokenizer: dict[str, Any]
    unusual: tuple[str, ...]

    @property
    def total(self) -> Part:
        """All parts together."""
        return sum(self.groups.values(), Part())

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("config", "groups", "types", "unusual")
        }
        kinds = {name: {"tensors": n, "bytes": size} for name, (n, size) in self.types.items()}
        return values | {
            "config": config_to_json(self.config),
            "groups": {name: dataclasses.asdict(part) for name, part in self.groups.items()},
            "total": dataclasses.asdict(self.total),
            "types": kinds,
            "unusual": list(self.unusual),
        }


def inspect_model(name: str | os.PathLike[str]) -> Report:
    """Describes the model that `resolve` finds by this name.

    Raises:
      StokerError: what `load_model` would refuse before it reads tensors.
    """
    path = resolve(name)
    opened = open_checkpoint(path)
    check_tensors(opened.checkpoint, opened.family, opened.config)
    checkpoint = opened.checkpoint
    groups, types = _parts(opened)
    config = dataclasses.replace(opened.config, kv_dtype="bfloat16")
    each = layer_token_bytes(config)
    context = config.max_positions
    tokens = (min(kind.window or context, context) for kind in config.layer_kinds)
    tokenizer = opened.tokenizer()
    return Report(
        name=str(name),
        path=str(path),
        format=_format(checkpoint),
        files=len(_files(checkpoint)),
        file_bytes=checkpoint.file_bytes,
        config=opened.config,
        groups=groups,
        types=types,
        kv_token_bytes=each * config.n_layers,
        kv_context_bytes=each * sum(tokens),
        tokenizer=_tokenizer(tokenizer),
        unusual=tuple(_unusual(opened, tokenizer, types)),
    )


def group_of(path: str, parameter: Parameter) -> str:
    """Which of `GROUPS` a parameter belongs to."""
    name = path.rpartition(".")[2]
    if name in ("embedding", "head"):
        return name
    if len(parameter.shape) == 1 or name.endswith("_bias"):
        return "norms and biases"
    if name == "router" or name.startswith("expert_"):
        return "experts"
    return "mlp" if name in _MLP or name.startswith("shared_") else "attention"


def _parts(opened: Opened) -> tuple[dict[str, Part], dict[str, tuple[int, int]]]:
    """Parts by group, and tensors by type."""
    tensors, config = opened.checkpoint.tensors, opened.config
    uses = naming_of(opened.checkpoint, opened.family).uses(config)
    groups: dict[str, Part] = {}
    named = dict(named_parameters(abstract_params(config)))
    for path, parameter in named.items():
        found = [tensors[name] for name in uses[path].tensors]
        stored = sum(tensor.nbytes for tensor in found)
        # Several parameters may share a tensor.
        whole = len(found) * int(np.prod(uses[path].shape, dtype=np.int64))
        file_bytes = stored * parameter.size // whole
        if parameter.dtype == "any":
            loaded = sum(_loaded_bytes(opened.checkpoint, tensor) for tensor in found)
            loaded = loaded * parameter.size // whole
            if uses[path].transposed and all(tensor.quantised for tensor in found):
                loaded = parameter.size * config.compute_dtype.itemsize
        else:
            loaded = parameter.size * 4
        active = parameter.size
        if path.rpartition(".")[2].startswith("expert_"):
            active = active * config.experts_per_token // config.n_experts
        part = Part(parameter.size, active, file_bytes, loaded)
        group = group_of(path, parameter)
        groups[group] = groups.get(group, Part()) + part
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for name in {name for use in uses.values() for name in use.tensors}:
        kind = type_of(tensors[name])
        counts[kind] += 1
        sizes[kind] += tensors[name].nbytes
    types = {kind: (counts[kind], size) for kind, size in sizes.most_common()}
    return {name: groups[name] for name in GROUPS if name in groups}, types


def type_of(tensor: Any) -> str:
    """How the checkpoint stores a tensor."""
    if isinstance(tensor, TensorInfo):
        return tensor.type.name
    if isinstance(tensor, StoredTensor):
        return tensor.dtype
    if isinstance(tensor, QuantisedTensor):
        return f"quantised ({', '.join(tensor.sources)})"
    assert isinstance(tensor, Stored)
    if not tensor.quantised:
        return tensor.leaves[""].dtype
    minimum = " with minima" if "minimum" in tensor.leaves else ""
    return f"int{tensor.statics['bits']} in groups of {tensor.statics['group']}{minimum}"


def _loaded_bytes(checkpoint: Any, tensor: Any) -> int:
    """Bytes of a matrix in memory, as its own type or a `QuantArray`."""
    if isinstance(tensor, QuantisedTensor):
        return int(checkpoint.loaded_bytes(tensor.name))
    if not isinstance(tensor, TensorInfo):
        return int(tensor.nbytes)
    rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
    # What one row of zeros becomes says it of all rows.
    row = dataclasses.replace(tensor, shape=(1, tensor.shape[-1]), nbytes=tensor.nbytes // rows)
    return rows * int(convert(blocks_of(np.zeros(row.nbytes, np.uint8), row), row.type).nbytes)


def _files(checkpoint: Any) -> list[str]:
    if isinstance(checkpoint, NativeCheckpoint):
        files = (path for path in checkpoint.path.rglob("*") if path.is_file())
        return [str(path) for path in files if "tokenizer" not in path.parts[-2:]]
    return [str(path) for path in checkpoint.paths]


def _format(checkpoint: Any) -> str:
    if isinstance(checkpoint, NativeCheckpoint):
        made = checkpoint.manifest
        return f"stoker ({made.storage}), from {made.source}"
    if isinstance(checkpoint, GGUFCheckpoint):
        return "GGUF"
    kind = f", {checkpoint.method}" if isinstance(checkpoint, QuantisedCheckpoint) else ""
    return f"safetensors{kind}"


def _tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    def spelt(ids: Any) -> dict[int, str]:
        return {token: tokenizer.token(token) for token in sorted(ids)}

    template = tokenizer.chat_template
    return {
        "kind": type(tokenizer).__name__.removesuffix("Tokenizer"),
        "tokens": tokenizer.vocab_size,
        "special_tokens": len(tokenizer.special_ids),
        "begin": spelt([] if tokenizer.bos_id is None else [tokenizer.bos_id]),
        "adds_begin": tokenizer.add_bos,
        "adds_end": tokenizer.add_eos,
        "end": spelt(tokenizer.stop_ids),
        "template_source": tokenizer.template_source,
        "template_characters": 0 if template is None else len(template),
    }


def _unusual(opened: Opened, tokenizer: Tokenizer, types: dict[str, tuple[int, int]]) -> list[str]:
    """Remarks, a line each."""
    config, lines = opened.config, []

    def note(applies: Any, text: str) -> None:
        if applies:
            lines.append(text)

    note(config.tied_head, "the embedding table is the output head too")
    rows = config.vocab_size - tokenizer.vocab_size
    note(rows > 0, f"the embedding has {rows} rows that no token has")
    note(rows < 0, f"{-rows} tokens have no embedding: the model does not load")
    note(tokenizer.chat_template is None, "there is no chat template")
    note(not tokenizer.stop_ids, "no token ends a reply")
    biased = ("attention_bias", "output_bias", "mlp_bias", "router_bias")
    names = [name.removesuffix("_bias") for name in biased if getattr(config, name)]
    note(names, f"biases of {', '.join(names)}")
    for name in ("attention_softcap", "logit_softcap"):
        value = getattr(config, name)
        note(value, f"{name.replace('_softcap', '')} scores are soft-capped at {value:g}")
    for name in ("embedding_scale", "residual_scale", "logit_scale"):
        value = getattr(config, name)
        note(value != 1, f"{name.replace('_', ' ')} {value:g}")
    note(config.attention_scale is not None, f"attention scale {config.score_scale:g}")
    note(config.qk_norm != "none", f"queries and keys are normed ({config.qk_norm})")
    note(config.post_norm, "norms after attention and MLP")
    note(not config.pre_norm, "no norms before attention and MLP")
    note(config.attention_sinks, "attention sinks")
    kinds = config.layer_kinds
    windows = sorted({kind.window for kind in kinds if kind.window})
    count = sum(kind.window > 0 for kind in kinds)
    widths = " or ".join(str(window) for window in windows)
    note(windows, f"{count} of {len(kinds)} layers see {widths} tokens at most")
    turned = sum(kind.rope == "none" for kind in kinds)
    note(turned, f"{turned} of {len(kinds)} layers have no rotary embedding")
    router = config.router
    note(
        config.n_experts and router.scores != "softmax", f"experts are scored by a {router.scores}"
    )
    note(router.choice_bias, "experts are chosen with a bias")
    note(router.groups > 1, f"experts are of {router.used_groups} of {router.groups} groups")
    note(router.scale != 1, f"weights of experts are scaled by {router.scale:g}")
    note(config.shared_d_ff, f"an MLP of {config.shared_d_ff} beside the experts")
    note(config.dense_layers, f"layers without experts at the start: {config.dense_layers}")
    note(config.predict_layers, f"layers that predict ahead, not loaded: {config.predict_layers}")
    note(
        config.rope.dims != config.head_dim and config.latent is None,
        f"{config.rope.dims} of {config.head_dim} elements of a head are rotated",
    )
    note(len(types) > 3, f"tensors of {len(types)} types")
    if isinstance(opened.checkpoint, GGUFCheckpoint):
        keys = Keys(opened.checkpoint, opened.family.architecture)
        read_config(opened.family, keys)
        note(keys.unread(), f"metadata that nothing reads: {', '.join(keys.unread())}")
    return lines


def rope_text(config: ModelConfig) -> str:
    """The rotary embeddings, in words."""
    texts = []
    for name, rope in config.ropes.items():
        text = f"base {rope.theta:g}"
        text += f", positions divided by {rope.scale:g}" if rope.scale != 1 else ""
        if rope.factors:
            text += f", frequencies divided by {min(rope.factors):g} to {max(rope.factors):g}"
        if rope.long_factors:
            text += f", others beyond {rope.original} tokens"
        texts.append(text if name == "main" else f"{name}: {text}")
    return "; ".join(texts)
