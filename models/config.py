"""What a model is, as one frozen hashable value: the static argument of every step."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from ..sharding import WHOLE, HeadCut, Split, head_cut
from .errors import StokerError
from .parts import PLAIN_ROUTER, Latent, Router

#: What is made of gate and up; see `ops.elementwise.gated`.
ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")
DTYPES = ("float32", "bfloat16")
#: What keys and values may be kept in: int8 with a scale to each token and head.
KV_DTYPES = (*DTYPES, "float8_e4m3fn", "int8")
#: Platforms with Pallas kernels, as JAX calls them.
PALLAS = ("tpu", "gpu")
PLATFORMS = ("xla", "cpu", *PALLAS)
ACTIVATION_TYPES = ("float32", "int8")
#: Normalisation of queries and keys: none, of each head (Qwen3), or of all heads as one (OLMo 2).
QK_NORMS = ("none", "head", "full")
#: Which of `ModelConfig.ropes` turns the queries and keys of a layer; "none" turns nothing.
ROPES = ("main", "local", "none")


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Who does the arithmetic.

    Attributes:
      platform: "xla", the reference, which runs anywhere; "cpu", the compiled kernels; or "tpu" or
        "gpu", the Pallas kernels for those. `ops.choices` tells what each operation comes to.
      activations: what quantised weights are multiplied with: "float32", the activations as they
        are, or "int8", where the kernels quantise them on the fly: on "tpu" and "gpu", of products
        that integers make faster.
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
        if self.activations == "int8" and self.platform == "xla":
            raise StokerError(
                "activations 'int8' need the kernels of a CPU, TPU or GPU; use float32 with 'xla'"
            )


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al. 2021), in the half-rotation layout of Hugging Face.

    Every kind of context extension is here as divisors of the frequencies and a factor on cosines
    and sines; `models/rotary.py` computes them.

    Attributes:
      theta: base of the frequencies, theta ** (-2i / dims).
      dims: leading elements of a head that are rotated; even, at most the head width.
      scale: positions are divided by this (linear scaling; 1 for none).
      factors: a divisor for each of the dims/2 frequencies, or empty for none.
      attention_factor: cosines and sines are multiplied by this.
      long_factors: takes the place of `factors` in contexts longer than `original` (LongRoPE), or
        empty; see `for_context`.
      original: tokens of the context that `factors` serve, where there are `long_factors`.
    """

    theta: float
    dims: int
    scale: float = 1.0
    factors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    long_factors: tuple[float, ...] = ()
    original: int = 0

    def frequencies(self) -> tuple[float, ...]:
        """Radians per position of each of the dims/2 rotated pairs."""
        pairs = range(self.dims // 2)
        factors = self.factors or (1.0,) * len(pairs)
        return tuple(self.theta ** (-2 * i / self.dims) / (self.scale * factors[i]) for i in pairs)

    def for_context(self, tokens: int) -> Rope:
        """The embedding for sequences of up to `tokens`, with the one set of factors they need."""
        if not self.long_factors:
            return self
        factors = self.long_factors if tokens > self.original else self.factors
        return dataclasses.replace(self, factors=factors, long_factors=(), original=0)

    def check(self, head_dim: int) -> None:
        """Raises `StokerError` unless this can turn heads of width `head_dim`."""
        if self.dims % 2 or not 0 < self.dims <= head_dim:
            raise StokerError(
                f"rotary width {self.dims} must be even and at most the head width {head_dim}"
            )
        for factors in (self.factors, self.long_factors):
            if factors and len(factors) != self.dims // 2:
                raise StokerError(f"{len(factors)} rotary factors for {self.dims // 2} frequencies")
        values = (self.theta, self.scale, self.attention_factor, *self.factors, *self.long_factors)
        for value in values:
            _positive("rotary base, scale and factors", value)


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What sets the attention of one layer apart.

    Attributes:
      window: tokens that a row sees, itself included; 0 for all.
      rope: one of `ROPES`.
    """

    window: int = 0
    rope: str = "main"

    def __post_init__(self) -> None:
        if self.window < 0:
            raise StokerError(f"an attention window of {self.window} tokens must be 0 or more")
        if self.rope not in ROPES:
            raise StokerError(f"rope '{self.rope}' is not known; supported: {', '.join(ROPES)}")


def plain_kinds(kinds: tuple[LayerKind, ...]) -> tuple[LayerKind, ...]:
    """`kinds`, or nothing where no layer is set apart: equal models get equal configurations."""
    return () if all(kind == LayerKind() for kind in kinds) else kinds


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
      d_ff: F, width of the gated MLP, or of each expert.
      max_positions: longest context that the model was made for, in tokens.
      norm_eps: epsilon of the RMS norms.
      rope: rotary embedding.
      local_rope: another one, for the layers whose kind asks for it; None where none does.
      kinds: what sets each of the L layers apart; empty where all are `LayerKind()`.
      tied_head: the embedding table is the output head too.
      attention_bias: query, key and value projections have biases.
      output_bias: the projection after attention has one.
      attention_sinks: each query head has a score that joins every softmax and has no value.
      mlp_bias: the three projections of the MLP, or of each expert, have biases.
      pre_norm: attention and MLP read their input through a norm.
      post_norm: their output goes through a norm before the residual sum.
      qk_norm: norm of queries and keys before rotation, one of `QK_NORMS`.
      activation: of the gate, one of `ACTIVATIONS`.
      attention_scale: factor on attention scores; None for H ** -0.5.
      attention_softcap: scores become cap * tanh(score / cap); 0 for none.
      logit_softcap: likewise for logits.
      embedding_scale: factor on embeddings, rounded to `dtype`.
      residual_scale: factor on what attention and MLP add to the residual stream.
      logit_scale: factor on logits, before the cap.
      n_experts: E, MLPs of each layer, of which a router picks a few for each token; 0: one MLP.
      experts_per_token: how many it picks.
      expert_norm: the weights of those it picks are made to sum to one.
      router_bias: its scores have a bias.
      router: how it scores and picks.
      dense_layers: so many layers at the start have one MLP in place of experts.
      dense_d_ff: width of that MLP; 0 without such layers.
      shared_d_ff: width of an MLP beside the experts that every token goes through; 0 for none.
      latent: attention by latent vectors, of which each token has one in the cache; None for keys
        and values of their own. `head_dim` is then the width of a query, and K is 1.
      predict_layers: layers after the last that checkpoints keep for predicting several tokens;
        they are not loaded.
      dtype: what activations are computed in, one of `DTYPES`.
      kv_dtype: what keys and values are kept in, one of `KV_DTYPES`.
      kernels: who does the arithmetic.
      split: how the devices of a mesh share the work; sizes above are always the whole model's.
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
    local_rope: Rope | None = None
    kinds: tuple[LayerKind, ...] = ()
    tied_head: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    attention_sinks: bool = False
    mlp_bias: bool = False
    pre_norm: bool = True
    post_norm: bool = False
    qk_norm: str = "none"
    activation: str = "silu"
    attention_scale: float | None = None
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    n_experts: int = 0
    experts_per_token: int = 0
    expert_norm: bool = True
    router_bias: bool = False
    router: Router = PLAIN_ROUTER
    dense_layers: int = 0
    dense_d_ff: int = 0
    shared_d_ff: int = 0
    latent: Latent | None = None
    predict_layers: int = 0
    dtype: str = "float32"
    kv_dtype: str = "float32"
    kernels: Kernels = Kernels()
    split: Split = WHOLE

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff")
        for name in (*sizes, "max_positions"):
            if getattr(self, name) < 1:
                raise StokerError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.n_heads % self.n_kv_heads:
            raise StokerError(
                f"{self.n_heads} query heads cannot share {self.n_kv_heads} KV heads evenly"
            )
        for rope in self.ropes.values():
            rope.check(self.head_dim)
        if self.n_experts and not 0 < self.experts_per_token <= self.n_experts:
            raise StokerError(
                f"{self.experts_per_token} experts for each token of {self.n_experts}; at least "
                "one and at most all can serve"
            )
        self._check_cache()
        self._check_kinds()
        self._check_numbers()
        self._check_parts()
        choices = (("activation", ACTIVATIONS), ("qk_norm", QK_NORMS))
        for name, known in (*choices, ("dtype", DTYPES), ("kv_dtype", KV_DTYPES)):
            if getattr(self, name) not in known:
                raise StokerError(
                    f"{name.removeprefix('kv_')} '{getattr(self, name)}' is not known; supported: "
                    f"{', '.join(known)}"
                )

    def _check_cache(self) -> None:
        known = [dtype for dtype in KV_DTYPES if dtype != "float8_e4m3fn"]
        if self.kernels.platform == "cpu" and self.kv_dtype not in known:
            raise StokerError(
                f"the CPU kernels keep keys and values as {', '.join(known)}, not "
                f"{self.kv_dtype}; use kernels='xla'"
            )
        if self.latent is not None and self.kv_dtype == "int8":
            raise StokerError("latent vectors are not kept as int8; use bfloat16 or float8_e4m3fn")

    def _check_kinds(self) -> None:
        if self.kinds and len(self.kinds) != self.n_layers:
            raise StokerError(f"{len(self.kinds)} kinds of layers for {self.n_layers} layers")
        if self.local_rope is None and any(kind.rope == "local" for kind in self.kinds):
            raise StokerError("a layer asks for the local rotary embedding, but there is none")

    def _check_numbers(self) -> None:
        _positive("norm epsilon", self.norm_eps)
        scales = (self.embedding_scale, self.residual_scale, self.logit_scale)
        for value in (*scales, self.score_scale):
            _positive("scales of attention, embeddings, residuals and logits", value)
        for value in (self.attention_softcap, self.logit_softcap):
            if not (math.isfinite(value) and value >= 0):
                raise StokerError(f"soft-caps must be positive, or 0 for none, not {value}")

    def _check_parts(self) -> None:
        """Raises `StokerError` unless latent attention, router and MLPs fit the rest."""
        if self.n_experts:
            self.router.check(self.n_experts, self.experts_per_token)
            _positive("factor on the weights of experts", self.router.scale)
        elif (
            self.router != PLAIN_ROUTER or self.router_bias or self.dense_layers or self.shared_d_ff
        ):
            raise StokerError(
                "a model with a router, dense layers or a shared MLP must have experts, not 0 of "
                "them; download its configuration again"
            )
        if not 0 <= self.dense_layers <= self.n_layers:
            raise StokerError(f"{self.dense_layers} dense layers of {self.n_layers} layers")
        if (self.dense_d_ff > 0) != (self.dense_layers > 0) or min(self.shared_d_ff, 0):
            raise StokerError(
                f"the MLP of {self.dense_layers} dense layers cannot be {self.dense_d_ff} wide, "
                f"and the shared one {self.shared_d_ff}; give positive widths where there is one"
            )
        if self.latent is None:
            return
        if (self.head_dim, self.n_kv_heads) != (self.latent.head_dim, 1):
            raise StokerError(
                f"latent attention with heads of {self.latent.head_dim} needs that head_dim and "
                f"one KV head, not {self.head_dim} and {self.n_kv_heads}"
            )
        if self.rope.dims != self.latent.rope_dim or self.kinds or self.qk_norm != "none":
            raise StokerError(
                "latent attention rotates rope_dim elements of every layer alike, without windows "
                "or norms of queries and keys; give a model of that kind"
            )
        if self.attention_bias or self.output_bias:
            raise StokerError("latent attention with biases is not supported; give a model without")

    def for_context(self, tokens: int) -> ModelConfig:
        """The configuration for sequences of up to `tokens`.

        Only LongRoPE models change: their rotary factors follow the longest context that is served,
        since keys in the cache cannot be turned again once a sequence grows past the original one.
        """
        local = self.local_rope and self.local_rope.for_context(tokens)
        return dataclasses.replace(self, rope=self.rope.for_context(tokens), local_rope=local)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each of the L layers."""
        return self.kinds or (LayerKind(),) * self.n_layers

    @property
    def ropes(self) -> dict[str, Rope]:
        """The rotary embeddings by the name that layers have for them."""
        local = {} if self.local_rope is None else {"local": self.local_rope}
        return {"main": self.rope, **local}

    @property
    def score_scale(self) -> float:
        """Factor on the attention scores."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def group_size(self) -> int:
        """G, query heads per KV head."""
        return self.n_heads // self.n_kv_heads

    @property
    def heads(self) -> HeadCut:
        """Which query and KV heads each part has."""
        return head_cut(self.n_heads, self.n_kv_heads, self.split.degree("heads"))

    @property
    def cache_dtype(self) -> jnp.dtype:
        """`kv_dtype` as a JAX type."""
        return jnp.dtype(self.kv_dtype)

    @property
    def compute_dtype(self) -> jnp.dtype:
        """`dtype` as a JAX type."""
        return jnp.dtype(self.dtype)


def _positive(what: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise StokerError(f"{what} must be positive, not {value}")
