"""Attention over some of a context's tokens, and how such parts make up the whole."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

#: The score of a key that a row does not see, and the logarithm of no sum: finite, so that
#: differences stay numbers.
NOTHING = -1e30


def gathered(rows: Sequence[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
    """Rows `[T/n, ?, H]` of n devices as `[T, ?, H]`, on all of them: one all-gather for all."""
    ends = [sum(part.shape[1] for part in rows[: i + 1]) for i in range(len(rows) - 1)]
    whole = jax.lax.all_gather(jnp.concatenate(rows, axis=1), axes, axis=0, tiled=True)
    return jnp.split(whole, ends, axis=1)


def joined(
    out: jax.Array, lse: jax.Array, axes: tuple[str, ...], sinks: jax.Array | None = None
) -> jax.Array:
    """This device's rows of the attention that the parts of n devices make up.

    Parts weigh as the sums of their exponentials do, relative to the largest, as blocks of
    FlashAttention (Dao et al. 2022): one all-reduce of a number for each row and head, and one
    reduce-scatter.

    Args:
      out: float32 `[T, N, H]`, attention over the tokens that this device has.
      lse: float32 `[T, N]`, as of `xla.partial_attention`.
      axes: of the mesh, which the devices lie along.
      sinks: float32 `[N]`, as of `xla.attention`: no part has them.

    Returns:
      Float32 `[T/n, N, H]`.
    """
    # What a row that sees nothing here was given may be anything, also no number.
    out = jnp.where((lse <= NOTHING / 2)[..., None], 0, out)
    peak = jax.lax.pmax(lse, axes)
    if sinks is not None:
        peak = jnp.maximum(peak, sinks)
    weight = jnp.exp(lse - peak)[..., None]
    sums = jnp.concatenate([out * weight, weight], axis=-1)
    sums = jax.lax.psum_scatter(sums, axes, scatter_dimension=0, tiled=True)
    weighted, total = sums[..., :-1], sums[..., -1]
    if sinks is not None:
        rows = total.shape[0]
        own = jax.lax.dynamic_slice_in_dim(peak, jax.lax.axis_index(axes) * rows, rows)
        total = total + jnp.exp(sinks - own)
    return weighted / jnp.maximum(total, 1e-30)[..., None]
