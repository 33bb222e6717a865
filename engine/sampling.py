"""What a request asks of sampling, and sampling itself: one fixed structure, on the device.

Order of the filters: temperature, top_k, top_p, min_p, as Hugging Face applies them; a filter sees
only what the ones before it kept, and at least the most likely token is always kept. Tokens as
likely as the last one kept are kept too. Randomness depends on (seed, position) alone.
"""

from __future__ import annotations

import dataclasses
import math
import secrets

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ..models.errors import StokerError

#: Below this temperature, drawing is indistinguishable from taking the best token, and is done so.
GREEDY_BELOW = 1e-5
MAX_TEMPERATURE = 100.0
MAX_SEED = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to choose the tokens of one reply. Each value is checked when this is made.

    Attributes:
      temperature: 0 takes the most likely token; up to `MAX_TEMPERATURE`.
      top_k: keep the k most likely tokens; 0 or -1 for all.
      top_p: keep the fewest most likely tokens whose probabilities add up to this; in [0, 1].
      min_p: keep tokens at least this share of the most likely one's probability; in [0, 1].
      seed: 0..2**63-1; None draws a fresh one.
      max_tokens: most tokens to generate; None for as many as the context holds.
      stop: strings that end the reply and are cut from it.
      ignore_eos: generate past the model's end tokens.

    Raises:
      StokerError: for a value out of range, naming it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0, MAX_TEMPERATURE)
        _check_range("top_p", self.top_p, 0, 1)
        _check_range("min_p", self.min_p, 0, 1)
        _check_integer("top_k", self.top_k, -1, None)
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, MAX_SEED)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1, None)
        for name in ("top_k", "seed", "max_tokens"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, int(value))
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise StokerError(f"stop holds {text!r}; it takes non-empty strings")


def _check_range(name: str, value: object, low: float, high: float) -> None:
    # NaN compares false with everything.
    if isinstance(value, bool) or not (
        isinstance(value, int | float | np.number) and low <= value <= high
    ):
        raise StokerError(f"{name} is {value!r}; it must be a number from {low} to {high}")


def _check_integer(name: str, value: object, low: int, high: int | None) -> None:
    top = math.inf if high is None else high
    if isinstance(value, bool) or not (isinstance(value, int | np.integer) and low <= value <= top):
        bound = f"from {low} to {high}" if high is not None else f"of at least {low}"
        raise StokerError(f"{name} is {value!r}; it must be a whole number {bound}")


@struct.dataclass
class Sampling:
    """The sampling parameters of all slots, one row each.

    Attributes:
      temperature: float32 `[S]`; below `GREEDY_BELOW` the best token is taken.
      top_k: int32 `[S]`; 0 for all.
      top_p: float32 `[S]`.
      min_p: float32 `[S]`.
      key: uint32 `[S, 2]`, the request's seed as a threefry key.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    key: jax.Array


def pack_sampling(requests: list[SamplingParams]) -> Sampling:
    """The rows of `Sampling` for `requests`, drawing a seed where one has none."""
    seeds = [secrets.randbelow(MAX_SEED) if r.seed is None else r.seed for r in requests]
    return Sampling(
        temperature=jnp.array([r.temperature for r in requests], jnp.float32),
        top_k=jnp.array([min(max(r.top_k, 0), 2**31 - 1) for r in requests], jnp.int32),
        top_p=jnp.array([r.top_p for r in requests], jnp.float32),
        min_p=jnp.array([r.min_p for r in requests], jnp.float32),
        key=jnp.array([(seed >> 32, seed & 0xFFFFFFFF) for seed in seeds], jnp.uint32),
    )


def sample(logits: jax.Array, sampling: Sampling, positions: jax.Array) -> jax.Array:
    """One token for each row of `logits [S, V]`, float32; int32 `[S]`.

    Args:
      logits: of the model, unscaled.
      sampling: a row per slot.
      positions: int32 `[S]`, the position each chosen token will take: with the seed, it alone
        decides the draw.
    """
    best = _first_largest(logits)
    greedy = sampling.temperature < GREEDY_BELOW
    drawn = jax.lax.cond(jnp.all(greedy), lambda: best, lambda: _draw(logits, sampling, positions))
    return jnp.where(greedy, best, drawn)


def _first_largest(values: jax.Array) -> jax.Array:
    """`argmax` over the last axis; of a row with NaN, some index in range.

    XLA on CPU vectorises two plain reductions, but not argmax's reduction of pairs.
    """
    width = values.shape[-1]
    index = jax.lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    largest = values.max(axis=-1, keepdims=True)
    return jnp.where(values == largest, index, width - 1).min(axis=-1)


def _draw(logits: jax.Array, sampling: Sampling, positions: jax.Array) -> jax.Array:
    scaled = logits / jnp.maximum(sampling.temperature, GREEDY_BELOW)[:, None]
    scaled = scaled - scaled.max(axis=-1, keepdims=True)
    kept = filter_logits(scaled, sampling)
    gumbel = jax.vmap(_gumbel, in_axes=(0, 0, None))(sampling.key, positions, logits.shape[-1])
    return _first_largest(kept + gumbel)


def _gumbel(key: jax.Array, position: jax.Array, width: int) -> jax.Array:
    stream = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position)
    return jax.random.gumbel(stream, (width,))


def filter_logits(scaled: jax.Array, sampling: Sampling) -> jax.Array:
    """`scaled [S, V]`, whose largest element is 0 in each row, with -inf for what is filtered out.

    Thresholds are found by bisection on the order of float32 bit patterns, which is exact and
    needs no sort: the k-th largest value, then the smallest set that reaches top_p.
    """
    whole = scaled.shape[-1]
    k = jnp.where((sampling.top_k <= 0) | (sampling.top_k > whole), whole, sampling.top_k)
    least = _largest_threshold(scaled, jnp.ones_like(scaled), k.astype(jnp.float32))
    scaled = jnp.where(scaled >= least[:, None], scaled, -jnp.inf)
    weights = jnp.exp(scaled)
    wanted = sampling.top_p * weights.sum(axis=-1)
    least = _largest_threshold(scaled, weights, wanted)
    # A top_p of 1 must keep all, whatever rounding made of the sum.
    least = jnp.where(sampling.top_p >= 1, -jnp.inf, least)
    least = jnp.maximum(least, jnp.log(sampling.min_p))
    return jnp.where(scaled >= jnp.minimum(least, 0)[:, None], scaled, -jnp.inf)


def _largest_threshold(values: jax.Array, weights: jax.Array, wanted: jax.Array) -> jax.Array:
    """The largest t `[S]` for which the weights of values >= t add up to `wanted [S]`.

    Values are at most 0, so that their negated bit patterns are ordered integers.
    """

    def to_float(order: jax.Array) -> jax.Array:
        return -jax.lax.bitcast_convert_type(order, jnp.float32)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # to_float(high) reaches `wanted`; order rises as the value falls
        middle = low + (high - low) // 2
        reached = jnp.where(values >= to_float(middle)[:, None], weights, 0).sum(axis=-1) >= wanted
        return jnp.where(reached, low, middle + 1), jnp.where(reached, middle, high)

    infinity = int(np.float32(np.inf).view(np.int32))
    low = jnp.zeros(values.shape[0], jnp.int32)
    _, high = jax.lax.fori_loop(0, 32, halve, (low, jnp.full_like(low, infinity)))
    return to_float(high)
