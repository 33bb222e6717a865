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


def grouped_matmul(
    x: jax.Array, weight: Weight, sizes: jax.Array, bias: jax.Array | None = None
) -> jax.Array:
    """Rows `x [T, C]`, sorted by group, times the transpose of their group's matrix.

    Args:
      x: the first `sizes[0]` rows belong to group 0, and so on.
      weight: `[E, R, C]`, quantised or not.
      sizes: int32 `[E]`, which sum to T.
      bias: float32 `[E, R]`, of which each row gets that of its group; None for none.

    Returns:
      float32 `[T, R]`, computed as `matmul` does.
    """
    axes = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    # Products of narrower floats are exact anyway, and TPUs refuse to be told so.
    exact = jax.lax.Precision.HIGHEST
    precision = exact if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    out = jax.lax.ragged_dot_general(
        x,
        densify(weight, x.dtype),
        sizes,
        axes,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return out if bias is None else out + rows_of_groups(bias, sizes, len(x))


def rows_of_groups(values: jax.Array, sizes: jax.Array, n_rows: int) -> jax.Array:
    """`values [E, R]` for each of T rows sorted by group: `[T, R]`."""
    groups = jnp.arange(len(sizes), dtype=jnp.int32)
    return values[jnp.repeat(groups, sizes, total_repeat_length=n_rows)]


def head_matmul(x: jax.Array, weight: Weight) -> jax.Array:
    """`x [T, N, C]`, each head times the transpose of its matrix of `weight [N, R, C]`.

    Returns:
      float32 `[T, N, R]`, computed as `matmul` does.
    """
    return jnp.einsum(
        "tnc,nrc->tnr",
        x,
        densify(weight, x.dtype),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
