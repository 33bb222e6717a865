"""Attention over a context that several devices share, in plain XLA."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ..elementwise import rotate
from ..layout import Layout
from ..quant_pages import Pages
from .attention import finished, partial_attention, partial_latent_attention


def shared_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    layout: Layout,
    *,
    axes: Sequence[str],
    turn: tuple[jax.Array, jax.Array],
    scale: float,
    sinks: jax.Array | None = None,
    window: int = 0,
    softcap: float = 0.0,
    by_token: bool = True,
) -> tuple[jax.Array, Pages, Pages]:
    """Attention where each of n devices has some rows, and a share of every page's tokens.

    The rows' queries, keys and values go to all devices (one all-gather), each of which attends to
    the keys it has; partial sums meet relative to the highest peak (one all-reduce of a number for
    each row and head, one reduce-scatter), as blocks of FlashAttention do (Dao et al. 2022). What
    moves is a step's rows, not the context's keys; no device ever holds these all.

    Args:
      q: `[T/n, N, H]`, not rotated; device i has rows from i T/n on.
      k: `[T/n, K, H]`, likewise.
      v: `[T/n, K, H]`.
      k_pages: `[P, K, H, Z]`, the part that this device has of pages of n Z tokens.
      v_pages: `[P, K, Z, H]`, likewise.
      layout: of all T rows, padded ones included.
      axes: of the mesh, which the devices lie along.
      turn: cosines and sines `[T, dims/2]`, of all rows.
      scale: as of `attention`; `sinks`, `window`, `softcap` and `by_token` likewise.

    Returns:
      Attention output `[T/n, N, H]` in q's dtype, and both page pools.
    """
    axes = tuple(axes)
    N, K = q.shape[1], k.shape[1]
    rows = jnp.concatenate([q, k, v], axis=1)
    rows = jax.lax.all_gather(rows, axes, axis=0, tiled=True)
    queries, keys, values = jnp.split(rows, (N, N + K), axis=1)
    peak, total, weighted, k_pages, v_pages = partial_attention(
        *(rotate(queries, *turn), rotate(keys, *turn), values, k_pages, v_pages, layout),
        scale=scale,
        sinks=sinks,
        window=window,
        softcap=softcap,
        share=jax.lax.axis_index(axes),
        shares=jax.lax.axis_size(axes),
        by_token=by_token,
    )
    return _joined(peak, total, weighted, axes).astype(q.dtype), k_pages, v_pages


def shared_latent_attention(
    q: jax.Array,
    latent: jax.Array,
    pages: jax.Array,
    layout: Layout,
    *,
    axes: Sequence[str],
    rank: int,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """`latent_attention` where devices share rows and pages as for `shared_attention`.

    Args:
      q: `[T/n, N, W]`, rotated.
      latent: `[T/n, W]`, likewise.
      pages: `[P, Z, W]`, the part that this device has of pages of n Z tokens.
      layout: of all T rows, padded ones included.
      axes: of the mesh, which the devices lie along.
      rank: as of `latent_attention`; `scale` likewise.

    Returns:
      Attention output `[T/n, N, R]` in q's dtype, and the pages.
    """
    axes = tuple(axes)
    rows = jnp.concatenate([q, latent[:, None]], axis=1)
    rows = jax.lax.all_gather(rows, axes, axis=0, tiled=True)
    peak, total, weighted, pages = partial_latent_attention(
        *(rows[:, :-1], rows[:, -1], pages, layout),
        rank=rank,
        scale=scale,
        share=jax.lax.axis_index(axes),
        shares=jax.lax.axis_size(axes),
    )
    return _joined(peak, total, weighted, axes).astype(q.dtype), pages


def _joined(
    peak: jax.Array, total: jax.Array, weighted: jax.Array, axes: tuple[str, ...]
) -> jax.Array:
    """This device's rows of the attention that all shares make up."""
    factor = jnp.exp(peak - jax.lax.pmax(peak, axes))
    sums = jnp.concatenate([weighted, total[..., None]], axis=-1) * factor[..., None]
    sums = jax.lax.psum_scatter(sums, axes, scatter_dimension=0, tiled=True)
    return finished(sums[..., :-1], sums[..., -1])
