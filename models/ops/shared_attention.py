"""Attention over a context that several devices share."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from ..config import Kernels
from .dispatch import Norm, latent_rows, partial_attention, partial_latent_attention
from .layout import Layout
from .partial import gathered, joined
from .quant_pages import Pages


def shared_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    layout: Layout,
    kernels: Kernels,
    *,
    axes: Sequence[str],
    turn: tuple[jax.Array, jax.Array],
    scale: float,
    sinks: jax.Array | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[jax.Array, Pages, Pages]:
    """Attention where each of n devices has some rows, and a share of every page's tokens.

    The rows' queries, keys and values go to all devices (one all-gather), each of which attends to
    the keys it has, by the kernels that attend on one device; then parts meet (`joined`). What
    moves is a step's rows, not the context's keys; no device ever holds these all.

    Args:
      q: `[T/n, N, H]`, not rotated; device i has rows from i T/n on.
      k: `[T/n, K, H]`, likewise.
      v: `[T/n, K, H]`.
      k_pages: `[P, K, H, Z]`, the part that this device has of pages of n Z tokens.
      v_pages: `[P, K, Z, H]`, likewise.
      layout: of all T rows, padded ones included.
      kernels: who computes.
      axes: of the mesh, which the devices lie along.
      turn: cosines and sines `[T, dims/2]`, of all rows.
      scale: as of `attention`; `sinks`, `window` and `softcap` likewise.

    Returns:
      Attention output `[T/n, N, H]` in q's dtype, and both page pools.
    """
    axes = tuple(axes)
    queries, keys, values = gathered((q, k, v), axes)
    out, lse, k_pages, v_pages = partial_attention(
        *(queries, keys, values, k_pages, v_pages, layout, kernels),
        share=jax.lax.axis_index(axes),
        shares=jax.lax.axis_size(axes),
        turn=turn,
        scale=scale,
        window=window,
        softcap=softcap,
    )
    return joined(out, lse, axes, sinks).astype(q.dtype), k_pages, v_pages


def shared_latent_attention(
    q: jax.Array,
    latent: jax.Array,
    pages: jax.Array,
    layout: Layout,
    kernels: Kernels,
    *,
    axes: Sequence[str],
    norm: Norm,
    turn: tuple[jax.Array, jax.Array],
    rank: int,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """`latent_attention` where devices share rows and pages as for `shared_attention`.

    Args:
      q: `[T/n, N, W]`, of this device's rows.
      latent: `[T/n, W]`, likewise.
      pages: `[P, Z, W]`, the part that this device has of pages of n Z tokens.
      layout: of all T rows, padded ones included.
      kernels: who computes.
      axes: of the mesh, which the devices lie along.
      norm: as of `latent_attention`; `rank` and `scale` likewise.
      turn: cosines and sines `[T/n, dims/2]`, of this device's rows.

    Returns:
      Attention output `[T/n, N, R]` in q's dtype, and the pages.
    """
    axes = tuple(axes)
    q, latent = latent_rows(q, latent, rank, norm, turn)
    queries, latents = gathered((q, latent[:, None]), axes)
    out, lse, pages = partial_latent_attention(
        *(queries, latents[:, 0], pages, layout, kernels),
        share=jax.lax.axis_index(axes),
        shares=jax.lax.axis_size(axes),
        rank=rank,
        scale=scale,
    )
    return joined(out, lse, axes).astype(q.dtype), pages
