"""Products with weights of any format, and embedding look-ups: the reference in plain XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..quantized import Weight, densify


def matmul(x: jax.Array, weight: Weight, dtype: jnp.dtype | None = None) -> jax.Array:
    """`x [T, C]` times the transpose of `weight [R, C]`, giving `[T, R]` in `dtype` or x's.

    Quantised weights are dequantised into x's dtype on the way; sums are float32, and float32
    operands are not rounded to what a platform multiplies fastest.
    """
    product = jnp.matmul(
        x,
        densify(weight, x.dtype).T,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return product.astype(dtype or x.dtype)


def embed(table: Weight, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows `tokens [T]` of `table [V, D]` as `[T, D]` of `dtype`; only these rows are read."""
    return densify(table[tokens], dtype)
