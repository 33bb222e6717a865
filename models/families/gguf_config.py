"""A `ModelConfig` from the metadata of a GGUF file."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checkpoints.gguf import GGUFCheckpoint
from ..config import LayerKind, ModelConfig, Rope, plain_kinds
from ..errors import StokerError
from ..rotary import yarn_attention_factor, yarn_factors
from .naming import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS

if TYPE_CHECKING:
    from .family import Family

#: Keys (after the architecture) that change the arithmetic, and the one value that does not. What
#: a family asks for is not among the refused.
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
        "rope.freq_base_swa": 0.0,
        "rope.scaling.attn_factor": 1.0,
        "use_parallel_residual": False,
    }
)
#: Keys that say what the shapes of tensors say.
_TOLD_BY_TENSORS = ("vocab_size",)


class Keys:
    """Typed look-ups of `<architecture>.<key>`, which remember what was asked for.

    Args:
      checkpoint: the file.
      architecture: the prefix of its keys.
    """

    def __init__(self, checkpoint: GGUFCheckpoint, architecture: str) -> None:
        self.checkpoint, self.metadata = checkpoint, checkpoint.metadata
        self.architecture = architecture
        self._asked: set[str] = set()

    def name(self, key: str) -> str:
        """The key as the file has it."""
        return f"{self.architecture}.{key}"

    def has(self, key: str) -> bool:
        """Whether the file has the key."""
        return self.name(key) in self.metadata

    def value(self, key: str, default: Any = None) -> Any:
        """The value of a key; without a default, its absence is an error."""
        self._asked.add(key)
        value = self.metadata.get(self.name(key), default)
        if value is None:
            raise StokerError(
                f"metadata key '{self.name(key)}' is missing; convert the model again"
            )
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number of 0 or more."""
        value = self.value(key, default)
        if type(value) is not int or value < 0:
            raise StokerError(f"'{self.name(key)}' must be one whole number, not {value!r:.40}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number."""
        value = self.value(key, default)
        if type(value) not in (int, float):
            raise StokerError(f"'{self.name(key)}' must be a number, not {value!r:.40}")
        return float(value)

    def check_neutral(self) -> None:
        """Raises `StokerError` for a key that changes the arithmetic and that nobody asked for."""
        for key, neutral in _NEUTRAL.items():
            value = self.metadata.get(self.name(key), neutral)
            if key not in self._asked and value != neutral:
                raise StokerError(
                    f"'{self.name(key)}' is {value!r:.40}, which is not supported; give a model "
                    "without it"
                )

    def unread(self) -> tuple[str, ...]:
        """Keys of the architecture that nobody asked for, as the file has them."""
        known = {self.name(key) for key in (*self._asked, *_NEUTRAL, *_TOLD_BY_TENSORS)}
        prefix = self.name("")
        return tuple(key for key in self.metadata if key.startswith(prefix) and key not in known)

    def factors(self, tensor: str) -> tuple[float, ...]:
        """The values of a short vector that is part of the configuration; empty without it."""
        info = self.checkpoint.tensors.get(tensor)
        if info is None:
            return ()
        if info.type.name != "F32" or len(info.shape) != 1 or info.nbytes > 1 << 16:
            raise StokerError(
                f"tensor '{tensor}' is {info.type.name} of shape {list(info.shape)}, not a short "
                "F32 vector; convert the model again"
            )
        return tuple(np.asarray(self.checkpoint.load(tensor)).tolist())


def model_config(family: Family, checkpoint: GGUFCheckpoint) -> ModelConfig:
    """The checkpoint's architecture, from its metadata and the shapes of its tensors.

    Raises `StokerError` naming the key or tensor that is missing or unsupported.
    """
    return read_config(family, Keys(checkpoint, family.architecture))


def read_config(family: Family, keys: Keys) -> ModelConfig:
    """As `model_config`, by `keys`, which then know what was asked for."""
    checkpoint = keys.checkpoint
    layers, positions = keys.integer("block_count"), keys.integer("context_length")
    if layers > len(checkpoint.tensors):
        raise StokerError(
            f"{keys.name('block_count')} is {layers} but the file has only "
            f"{len(checkpoint.tensors)} tensors; it is damaged: download it again"
        )
    d_model, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    if heads < 1:
        raise StokerError(f"{keys.name('attention.head_count')} must be at least 1")
    head_dim = keys.integer("attention.key_length", d_model // heads)
    embedding = family.gguf.tensors["embedding"]
    if embedding not in checkpoint.tensors:
        raise StokerError(f"tensor '{embedding}' is missing; give a complete checkpoint")
    fields: dict[str, Any] = {
        "family": family.name,
        "vocab_size": checkpoint.tensors[embedding].shape[0],
        "d_model": d_model,
        "n_layers": layers,
        "n_heads": heads,
        "n_kv_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "d_ff": keys.integer("feed_forward_length"),
        "max_positions": positions,
        "norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        **family.gguf.presence(checkpoint.tensors, layers),
    }
    fields["rope"] = _rope(keys, head_dim, positions)
    fields |= family.traits
    fields |= family.from_keys(keys, fields)
    if "latent" not in fields and keys.integer("attention.value_length", head_dim) != head_dim:
        raise StokerError(
            f"{keys.name('attention.value_length')} differs from the key width {head_dim}, "
            "which is not supported; give a model whose heads have one width"
        )
    if "kinds" not in fields:
        fields["kinds"] = windowed(keys, fields, sliding_layers(keys, fields, period=1))
    fields["kinds"] = plain_kinds(fields["kinds"])
    keys.check_neutral()
    return ModelConfig(**fields)


def sliding_layers(keys: Keys, fields: Mapping[str, Any], period: int) -> list[bool]:
    """Which layers have a window: what the file says, or all but each `period`-th.

    `attention.sliding_window_pattern` is a period, or a flag for each layer. With a period of 1
    every layer has the window.
    """
    layers = fields["n_layers"]
    pattern = keys.value("attention.sliding_window_pattern", period)
    if isinstance(pattern, list):
        if len(pattern) != layers:
            raise StokerError(
                f"'{keys.name('attention.sliding_window_pattern')}' has {len(pattern)} entries for "
                f"{layers} layers; convert the model again"
            )
        return [bool(flag) for flag in pattern]
    period = keys.integer("attention.sliding_window_pattern", period) or 1
    return [period == 1 or (layer + 1) % period != 0 for layer in range(layers)]


def windowed(
    keys: Keys, fields: Mapping[str, Any], sliding: Iterable[bool]
) -> tuple[LayerKind, ...]:
    """The file's window on the layers that slide; one that no context reaches is none."""
    window = keys.integer("attention.sliding_window", 0)
    window = window if window < fields["max_positions"] else 0
    return tuple(LayerKind(window if slides else 0) for slides in sliding)


def _rope(keys: Keys, head_dim: int, positions: int) -> Rope:
    theta = keys.number("rope.freq_base", 10000.0)
    dims = keys.integer("rope.dimension_count", head_dim)
    short, long = keys.factors(SHORT_FACTORS), keys.factors(LONG_FACTORS)
    kind = keys.value("rope.scaling.type", "unstated")
    if short or long:
        if not (short and long):
            raise StokerError(f"the file lacks '{SHORT_FACTORS}' or '{LONG_FACTORS}'")
        return Rope(
            theta,
            dims,
            factors=short,
            attention_factor=keys.number("rope.scaling.attn_factor", 1.0),
            long_factors=long,
            original=keys.integer("rope.scaling.original_context_length", positions),
        )
    if kind == "yarn":
        return yarn(keys, theta, dims, positions)
    return Rope(theta, dims, scale=_linear_scale(keys, kind), factors=keys.factors(ROPE_FACTORS))


def yarn(keys: Keys, theta: float, dims: int, positions: int, truncate: bool = True) -> Rope:
    """The YaRN scaling that the file describes; `truncate` as of `yarn_factors`."""
    factor = keys.number("rope.scaling.factor")
    original = keys.integer("rope.scaling.original_context_length", positions)
    try:
        factors = yarn_factors(
            theta,
            dims,
            factor=factor,
            original=original,
            beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
            truncate=truncate,
        )
        attention = yarn_attention_factor(factor)
    except (ValueError, ArithmeticError):
        raise StokerError(
            f"'{keys.name('rope.scaling.factor')}' {factor} over {original} tokens is no YaRN "
            "scaling; convert the model again"
        ) from None
    attention *= keys.number("rope.scaling.attn_factor", 1.0)
    return Rope(theta, dims, factors=factors, attention_factor=attention)


def _linear_scale(keys: Keys, kind: Any) -> float:
    """The factor of linear scaling, 1 for none; other kinds raise `StokerError`.

    A factor without a kind means linear scaling, as in files older than the key.
    """
    factor = "rope.scaling.factor" if keys.has("rope.scaling.factor") else "rope.scale_linear"
    if kind == "none":
        return 1.0
    if kind == "unstated":
        return keys.number(factor, 1.0) or 1.0
    if kind == "linear":
        return keys.number(factor)
    raise StokerError(
        f"'{keys.name('rope.scaling.type')}' is {kind!r:.40}, which is not supported; give a "
        "model with linear or YaRN scaling, or none"
    )
