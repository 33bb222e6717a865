"""Activations as small integers, and which products are worth doing so: what TPUs and GPUs share.

With the columns of a block b sharing the scale `s[t, b]` of a row's codes `k`, and weights as
`QuantArray` says, z being the zero point::

    y[t, r] = sum over b of  s[t, b] scale[r, b] (sum over c of k[t, c] code[r, c])
                           + s[t, b] (sum over c of k[t, c]) (minimum[r, b] - z scale[r, b])

where the sums over the columns of a block are of integers, and exact. Where codes have 4 bits, z is
subtracted from them, which int8 holds, and not in the second line.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from ..errors import StokerError
from ..quantized import QuantArray

#: Columns of x that share a scale, at most. The CPU kernels' 32 would leave the matrix units idle
#: (see `README.md`), which also says what the rounding costs.
BLOCK = 128
#: Rows from which a product is bound by arithmetic rather than by reading its weights.
LEAST_ROWS = 128
#: Rows that a TPU keeps next to each other.
_ROWS = 8


def why_widened(weight: QuantArray) -> str | None:
    """Why a product with `weight` is one of floats whatever its rows; None if integers serve."""
    if block_of(weight) < BLOCK:
        return f"sums of fewer than {BLOCK} columns, which groups of {weight.group} ask for"
    return why_unreadable(weight)


def why_unreadable(weight: QuantArray) -> str | None:
    """Why no kernel multiplies the codes of `weight` as integers; None if one may."""
    if weight.levels or not jnp.issubdtype(weight.codes.dtype, jnp.integer):
        return "codes that stand for floats"
    if weight.super_scale is not None or weight.super_minimum is not None:
        return "scales with factors of their own"
    return None


def check_readable(weight: QuantArray, unsupported: str | None) -> None:
    """Raises `StokerError` if a kernel has something against the codes of `weight`, or all have."""
    reason = unsupported or why_unreadable(weight)
    if reason:
        raise StokerError(
            f"a weight of shape {list(weight.shape)} cannot be multiplied as integers: {reason}; "
            "use activations='float32'"
        )


def block_of(weight: QuantArray) -> int:
    """Columns that share a scale of x: those of a group, or as many as divide it and `BLOCK`."""
    return math.gcd(weight.group, BLOCK)


def zero_point_left(weight: QuantArray) -> int:
    """What is not subtracted from codes, since int8 might not hold the difference."""
    return 0 if weight.bits == 4 else weight.zero_point


@dataclasses.dataclass(frozen=True)
class Rounded:
    """Rows `x [T, C]` as integers, with blocks of B columns; zeros make T whole eights.

    Attributes:
      codes: int8 `[C/B, T, B]`; where the weights have 4 bits, a block begins with those columns
        that meet the low halves of bytes.
      scale: float32 `[C/B, T]`.
      sums: float32 `[C/group, T]`, of what the codes of a weight's group stand for; None where
        there is nothing to multiply them with, neither a minimum nor a zero point left.
    """

    codes: jax.Array
    scale: jax.Array
    sums: jax.Array | None


def round_rows(x: jax.Array, weight: QuantArray) -> Rounded:
    """`x [T, C]` rounded to 127ths of the largest magnitude of each block, as `weight` is read.

    Plain XLA, which makes a fusion or two of it, and one of equal ones.
    """
    x = jnp.pad(x, ((0, -x.shape[0] % _ROWS), (0, 0)))
    T, C = x.shape
    block = block_of(weight)
    if weight.bits == 4 and block < weight.group:
        halves = x.reshape(T, C // weight.group, 2, weight.group // block, block // 2)
        x = halves.swapaxes(2, 3)
    # As rows lie in a TPU's memory, where a plain [T, C/B, B] would be copied twice.
    blocks = x.reshape(T // _ROWS, _ROWS, C // block, block)
    blocks = blocks.transpose(2, 0, 1, 3).astype(jnp.float32)
    largest = jnp.abs(blocks).max(axis=-1)
    inverse = jnp.where(largest > 0, 127 / largest, 0)
    codes = jnp.rint(blocks * inverse[..., None]).astype(jnp.int8)
    scale = largest / 127
    sums = None
    if weight.minimum is not None or zero_point_left(weight):
        sums = scale * codes.astype(jnp.int32).sum(axis=-1).astype(jnp.float32)
        sums = sums.reshape(C // weight.group, -1, T).sum(axis=1)
    return Rounded(codes.reshape(-1, T, block), scale.reshape(-1, T), sums)
