"""Products of each head with a matrix of its own, which is read as it is stored."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...quantized import QuantArray
from .matmul import grouped_matmul


def head_matmul(
    x: jax.Array, weight: QuantArray, *, dtype: Any = jnp.float32, interpret: bool = False
) -> jax.Array:
    """`x [T, N, C]` times the transpose of each head's matrix of a quantised `weight [N, R, C]`.

    Heads are the groups of `grouped_matmul`, whose blocks hold no more rows than a head has.

    Args:
      x: bfloat16 or float32.
      weight: what `why_unsupported` has nothing against.
      dtype: of the result.
      interpret: run the kernel as plain JAX, on any platform.

    Returns:
      `[T, N, R]` of `dtype`.
    """
    T, N, C = x.shape
    rows, sizes = x.swapaxes(0, 1).reshape(N * T, C), jnp.full(N, T, jnp.int32)
    out = grouped_matmul(rows, weight, sizes, dtype=dtype, interpret=interpret)
    return out.reshape(N, T, -1).swapaxes(0, 1)
