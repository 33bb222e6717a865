"""Products of each head with a matrix of its own, which is read as it is stored."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...quantized import QuantArray
from ..visits import groups_as_heads, heads_as_groups
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
    rows, sizes = heads_as_groups(x)
    out = grouped_matmul(rows, weight, sizes, dtype=dtype, interpret=interpret)
    return groups_as_heads(out, len(sizes))
