"""What the sampling of a token is told, and the number that decides a draw."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

#: Bits of the words of `Sampling.allowed`.
WORD = 32


@struct.dataclass
class Sampling:
    """The sampling parameters of S slots, one row each.

    A row that nobody uses should ask for nothing, as `idle_sampling` in the engine does: the
    reference computes what any row asks for on all rows.

    Attributes:
      temperature: float32 `[S]`; 0 takes the best token.
      top_k: int32 `[S]`; 0 for all.
      top_p: float32 `[S]`.
      min_p: float32 `[S]`.
      key: uint32 `[S, 2]`, the request's seed, high word first.
      repetition: float32 `[S]`; 1 for none.
      presence: float32 `[S]`.
      frequency: float32 `[S]`.
      bias_ids: int32 `[S, MAX_BIASES]`, padded with -1; without those that `allowed` expresses.
      bias_values: float32 `[S, MAX_BIASES]`, padded with 0.
      allowed: uint32 `[S, ceil(V / 32)]`; bit i of word w is set where token 32 w + i may be
        generated. Bits from V on are clear. A grammar may write other masks here at each step.
      has_mask: bool `[S]`, whether `allowed` leaves anything out; only then it is read.
      end_ids: int32 `[S, MAX_END_IDS]`, each once, padded with -1: not generated before `min_lens`.
      min_lens: int32 `[S]`, the position from which `end_ids` may be generated.
      prompt_lens: int32 `[S]`, the position at which the reply begins.
      wants_top: bool `[S]`, whether the row wants alternatives.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    key: jax.Array
    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array
    allowed: jax.Array
    has_mask: jax.Array
    end_ids: jax.Array
    min_lens: jax.Array
    prompt_lens: jax.Array
    wants_top: jax.Array

    def rows_of(self, slots: jax.Array) -> Sampling:
        """The rows of `slots` (int32 `[B]`); from S on, the last."""
        return jax.tree.map(lambda rows: rows.at[slots].get(mode="clip"), self)


def uniforms(keys: jax.Array, positions: jax.Array) -> jax.Array:
    """A number in [0, 1), of 24 random bits, for each key `[B, 2]` and position `[B]`.

    A pure function of both: the first word of `philox`, whose counter is the position and the key's
    high word, and whose key is the low one, so that no two pairs share their input.
    """
    first, _ = philox(positions.astype(jnp.uint32), keys[:, 0], keys[:, 1])
    return (first >> 8).astype(jnp.float32) * np.float32(2**-24)


def philox(low: jax.Array, high: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Philox2x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    Two random words, uint32 as all arguments, for the counter's two words and the key: a bijection
    of counters for each key. Few integer operations, which XLA compiles in a tenth of the time of
    JAX's own generator.
    """
    for step in range(10):
        product_high, product_low = _multiply(0xD256D193, low)
        weyl = np.uint32(step * 0x9E3779B9 & 0xFFFFFFFF)
        low, high = product_high ^ (key + weyl) ^ high, product_low
    return low, high


def _multiply(factor: int, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """High and low word of `factor * x`, by halves: XLA has no wider product of uint32."""
    low, high = np.uint32(factor & 0xFFFF), np.uint32(factor >> 16)
    x_low, x_high = x & 0xFFFF, x >> 16
    cross = low * x_high
    middle = (low * x_low >> 16) + (cross & 0xFFFF) + high * x_low
    return high * x_high + (cross >> 16) + (middle >> 16), np.uint32(factor) * x
