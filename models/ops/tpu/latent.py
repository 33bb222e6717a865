"""Latent attention over ragged pages: one vector of a token is key and value of all heads."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..blocks import block_size, query_blocks
from ..layout import Layout
from ..partial import NOTHING
from .append import append_latent
from .common import EXACT
from .rounds import Sizes, attend_by_rounds, fold, pages_at_once, visible, widen

#: Queries (rows times heads) that share a reading of the vectors: enough for products to take
#: longer than the reading does.
ROWS = 512
#: So many queries keep the matrix units busy with what few pages hold; more pages would only be
#: more that a short context does not fill.
MANY_ROWS = 128


def latent_attention(
    q: jax.Array,
    latent: jax.Array,
    pages: jax.Array,
    layout: Layout,
    *,
    rank: int,
    scale: float,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Appends latent vectors to the pages, then attends causally over live pages.

    As `attention`, with one KV head: a vector is read once, and meets the queries of all heads as a
    key and their weights as a value.

    Args:
      q: `[T, N, W]`: a query in the latent space, then its rotated part.
      latent: `[T, W]`: the normed latent vector, then the rotated key.
      pages: `[P, Z, W]`, or wider, with zeros after W; donate it, and it is updated in place.
      layout: where the rows sit, as for `attention`.
      rank: R, how many of the W numbers are the value.
      scale: factor on the scores.
      interpret: run the kernels as plain JAX, on any platform.

    Returns:
      Attention output `[T, N, R]` in q's dtype, still in the latent space, and the pages.
    """
    (out,), pages = _latent_attention(
        q, latent, pages, layout, rank=rank, scale=scale, interpret=interpret
    )
    return out.astype(q.dtype), pages


def partial_latent_attention(
    *arrays: Any, share: jax.Array | int, shares: int, **options: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`latent_attention` over one of `shares` shares of each page's tokens.

    As `xla.partial_latent_attention`; further arguments are those of `latent_attention`.
    """
    (out, lse), pages = _latent_attention(*arrays, part=(share, shares), **options)
    return out, lse, pages


def _latent_attention(
    q: jax.Array,
    latent: jax.Array,
    pages: jax.Array,
    layout: Layout,
    *,
    rank: int,
    scale: float,
    interpret: Any = False,
    part: tuple[jax.Array | int, int] | None = None,
) -> tuple[list[jax.Array], jax.Array]:
    """Output `[T, N, R]`, of a part in float32 and with logarithms of sums; and the pages."""
    share, shares = part or (0, 1)
    pages = append_latent(latent, pages, layout, share=share, shares=shares, interpret=interpret)
    T, N, W = q.shape
    Z, width = pages.shape[1:]
    M = layout.page_table.shape[1]
    blocks = query_blocks(layout, T, block_size(layout, T, ROWS // N), share * Z)
    queries = jnp.pad(blocks.gather(q, 1), (*((0, 0),) * 3, (0, width - W)))
    sizes = Sizes(
        G=N,
        Z=Z,
        whole=Z * shares,
        M=M,
        pages=pages_at_once([pages], M, 4 if blocks.size * N >= MANY_ROWS else 8),
        size=blocks.size,
        scale=scale,
        window=0,
        softcap=0.0,
        quantised=False,
        sinks=False,
        by_token=True,
        partial=part is not None,
        values=rank,
        pools=1,
    )
    found = attend_by_rounds(
        *(_attend, queries, None, [pages], layout, blocks, sizes),
        name="stoker_latent_attention",
        interpret=interpret,
    )
    out, *lse = (blocks.scatter(rows, layout, T, M * Z * shares) for rows in found)
    return [out, *(row[..., 0] for row in lse)], pages


def _attend(
    q_ref: Any,
    buffers: list[Any],
    sums: tuple[Any, Any, Any],
    position: Any,
    last: Any,
    start: Any,
    sizes: Sizes,
) -> None:
    """Adds a round of pages, whose first token has position `start`, to the online softmax."""
    (pages_ref,) = buffers
    peak_ref, total_ref, sum_ref = sums
    R, C = q_ref.shape[2], sizes.pages * sizes.Z
    narrow = all(ref.dtype != jnp.float32 for ref in (q_ref, pages_ref))
    work = jnp.bfloat16 if narrow else jnp.float32
    precision = None if narrow else EXACT

    @pl.when(start + (sizes.pages - 1) * sizes.whole + sizes.Z > last + 1)
    def _() -> None:
        # A weight of zero does not silence a NaN that an earlier owner left in the page.
        held = pages_ref[...]
        token = start + sizes.whole * jax.lax.broadcasted_iota(jnp.int32, held.shape, 0)
        token = token + jax.lax.broadcasted_iota(jnp.int32, held.shape, 1)
        pages_ref[...] = jnp.where(token <= last, held, jnp.zeros_like(held))

    vectors = widen(pages_ref[...], work).reshape(C, pages_ref.shape[2])
    score = sizes.scale * jax.lax.dot_general(
        q_ref[0, 0].astype(work),
        vectors,
        (((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    score = jnp.where(visible(R, position, last, start, sizes), score, NOTHING)
    weights, decay = fold(score, peak_ref.at[0], total_ref.at[0])
    sum_ref[0] = sum_ref[0] * decay + jnp.dot(
        weights.astype(work),
        vectors[:, : sizes.values],
        precision=precision,
        preferred_element_type=jnp.float32,
    )
