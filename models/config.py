"""What a model is, as one frozen hashable value: the static argument of every step."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from .errors import StokerError

ACTIVATIONS = ("silu", "gelu_tanh")
DTYPES = ("float32", "bfloat16")
PLATFORMS = ("xla", "cpu")
ACTIVATION_TYPES = ("float32", "int8")


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Who does the arithmetic.

    Attributes:
      platform: "xla", the reference, which runs anywhere; or "cpu", the compiled kernels.
      activations: what quantised weights are multiplied with: "float32", the activations as they
        are, or "int8", where the kernels quantise them on the fly (only on "cpu").
    """

    platform: str = "xla"
    activations: str = "float32"

    def __post_init__(self) -> None:
        if self.platform not in PLATFORMS:
            raise StokerError(
                f"kernels '{self.platform}' are not known; supported: {', '.join(PLATFORMS)}"
            )
        if self.activations not in ACTIVATION_TYPES:
            raise StokerError(
                f"activations '{self.activations}' are not known; supported: "
                f"{', '.join(ACTIVATION_TYPES)}"
            )
        if self.activations == "int8" and self.platform != "cpu":
            raise StokerError("activations 'int8' need the CPU kernels; use float32 with 'xla'")


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al. 2021), in the half-rotation layout of Hugging Face.

    Attributes:
      theta: base of the frequencies, theta ** (-2i / dims).
      dims: leading elements of a head that are rotated; even, at most the head width.
      scale: positions are divided by this (linear scaling; 1 for none).
      factors: a divisor for each of the dims/2 frequencies (as llama3 scaling makes them), or
        empty for none.
    """

    theta: float
    dims: int
    scale: float = 1.0
    factors: tuple[float, ...] = ()

    def frequencies(self) -> tuple[float, ...]:
        """Radians per position of each of the dims/2 rotated pairs."""
        pairs = range(self.dims // 2)
        factors = self.factors or (1.0,) * len(pairs)
        return tuple(self.theta ** (-2 * i / self.dims) / (self.scale * factors[i]) for i in pairs)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The architecture of a decoder and the type it computes in.

    Attributes:
      family: name of the family in `models/families`.
      vocab_size: V, rows of the embedding table.
      d_model: D.
      n_layers: L.
      n_heads: N, query heads.
      n_kv_heads: K, key and value heads; divides N.
      head_dim: H; not always D / N.
      d_ff: F, width of the gated MLP.
      max_positions: longest context that the model was made for, in tokens.
      norm_eps: epsilon of the RMS norms.
      rope: rotary embedding.
      tied_head: the embedding table is the output head too.
      attention_bias: query, key and value projections have biases.
      activation: of the gate, one of `ACTIVATIONS`.
      dtype: what activations are computed in, one of `DTYPES`.
      kv_dtype: what keys and values are kept in, likewise.
      kernels: who does the arithmetic.
    """

    family: str
    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    max_positions: int
    norm_eps: float
    rope: Rope
    tied_head: bool = False
    attention_bias: bool = False
    activation: str = "silu"
    dtype: str = "float32"
    kv_dtype: str = "float32"
    kernels: Kernels = Kernels()

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff")
        for name in (*sizes, "max_positions"):
            if getattr(self, name) < 1:
                raise StokerError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.n_heads % self.n_kv_heads:
            raise StokerError(
                f"{self.n_heads} query heads cannot share {self.n_kv_heads} KV heads evenly"
            )
        if self.rope.dims % 2 or not 0 < self.rope.dims <= self.head_dim:
            raise StokerError(
                f"rotary width {self.rope.dims} must be even and at most the head width "
                f"{self.head_dim}"
            )
        if self.rope.factors and len(self.rope.factors) != self.rope.dims // 2:
            raise StokerError(
                f"{len(self.rope.factors)} rotary factors for {self.rope.dims // 2} frequencies"
            )
        for value in (self.norm_eps, self.rope.theta, self.rope.scale, *self.rope.factors):
            if not (math.isfinite(value) and value > 0):
                raise StokerError(
                    f"norm epsilon, rotary base, scale and factors must be positive, not {value}"
                )
        if self.activation not in ACTIVATIONS:
            raise StokerError(
                f"activation '{self.activation}' is not known; supported: {', '.join(ACTIVATIONS)}"
            )
        for dtype in (self.dtype, self.kv_dtype):
            if dtype not in DTYPES:
                raise StokerError(f"dtype '{dtype}' is not known; supported: {', '.join(DTYPES)}")

    @property
    def group_size(self) -> int:
        """G, query heads per KV head."""
        return self.n_heads // self.n_kv_heads

    @property
    def cache_dtype(self) -> jnp.dtype:
        """`kv_dtype` as a JAX type."""
        return jnp.dtype(self.kv_dtype)

    @property
    def compute_dtype(self) -> jnp.dtype:
        """`dtype` as a JAX type."""
        return jnp.dtype(self.dtype)
