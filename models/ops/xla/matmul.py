"""Products with weights of any format, in plain XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ...quantized import Weight, densify


def matmul(x: jax.Array, weight: Weight) -> jax.Array:
    """`x [T, C]` times the transpose of `weight [R, C]`, giving float32 `[T, R]`.

    Quantised weights are dequantised into x's dtype on the way; sums are float32, and float32
    operands are not rounded to what a platform multiplies fastest.
    """
    return jnp.matmul(
        x,
        densify(weight, x.dtype).T,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
