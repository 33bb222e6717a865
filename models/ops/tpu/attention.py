"""Attention over ragged pages: prompts and decoding rows in one kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..blocks import block_size, query_blocks
from ..layout import Layout
from ..partial import NOTHING
from ..quant_pages import Pages, QuantPages, tpu_values_by_token
from .append import append
from .common import EXACT, LANES, VMEM_BYTES
from .rounds import Sizes, attend_by_rounds, fold, pages_at_once, visible, widen

#: Rows of queries (of one KV head) that share a reading of the keys: about where products on the
#: matrix units take as long as the reading does.
ROWS = 256
#: Bytes that all KV heads' rows may take.
ROWS_BYTES = VMEM_BYTES // 2


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    layout: Layout,
    *,
    scale: float,
    sinks: jax.Array | None = None,
    window: int = 0,
    softcap: float = 0.0,
    interpret: Any = False,
) -> tuple[jax.Array, Pages, Pages]:
    """Appends this step's keys and values to the pages, then attends causally over live pages.

    The online softmax of FlashAttention (Dao et al. 2022). Queries are cut into blocks of one
    slot's rows, which share a reading of that slot's pages; pages before the window of a block or
    behind its last row are not read. While one round of pages is worked on the next is on its
    way, also that of the next block.

    Scores and sums are float32. Operands of products are float32 where q or the pages are, else
    bfloat16: so are the weights of values then.

    Args:
      q: `[T, N, H]`, rotated.
      k: `[T, K, H]`, rotated.
      v: `[T, K, H]`.
      k_pages: `[P, K, H, Z]`; donate it, and it is updated in place.
      v_pages: `[P, K, *tpu_value_shape(Z, H)]`, likewise.
      layout: where the rows sit. A row past the M * Z tokens of its pages writes nothing, and its
        output is NaN; padding rows yield zeros.
      scale: factor on the scores, usually H ** -0.5.
      sinks: float32 `[N]`, one more score for each query head, without a value; None for none.
      window: tokens that a row sees, itself included; 0 for all.
      softcap: scores become softcap * tanh(score / softcap); 0 for none.
      interpret: run the kernels as plain JAX, on any platform.

    Returns:
      Attention output `[T, N, H]` in q's dtype, and both page pools.
    """
    options: dict[str, Any] = {"sinks": sinks, "scale": scale, "window": window, "softcap": softcap}
    (out,), k_pages, v_pages = _attention(
        q, k, v, k_pages, v_pages, layout, interpret=interpret, **options
    )
    return out.astype(q.dtype), k_pages, v_pages


def partial_attention(
    *arrays: Any, share: jax.Array | int, shares: int, **options: Any
) -> tuple[jax.Array, jax.Array, Pages, Pages]:
    """`attention` over one of `shares` shares of each page's tokens; as `xla.partial_attention`.

    Further arguments are those of `attention`, but for sinks.
    """
    (out, lse), k_pages, v_pages = _attention(*arrays, part=(share, shares), **options)
    return out, lse, k_pages, v_pages


def _attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    layout: Layout,
    *,
    scale: float,
    sinks: jax.Array | None = None,
    window: int = 0,
    softcap: float = 0.0,
    interpret: Any = False,
    part: tuple[jax.Array | int, int] | None = None,
) -> tuple[list[jax.Array], Pages, Pages]:
    """Output `[T, N, H]`, of a part in float32 and with logarithms of sums; and both page pools."""
    share, shares = part or (0, 1)
    k_pages, v_pages = append(
        k, v, k_pages, v_pages, layout, share=share, shares=shares, interpret=interpret
    )
    T, N, H = q.shape
    K, Z = k_pages.shape[1], k_pages.shape[3]
    M, G = layout.page_table.shape[1], N // K
    # Two copies each of queries and results; peaks, totals and sums.
    results = 4 * (H + LANES) if part else H * q.dtype.itemsize
    row_bytes = K * (2 * H * q.dtype.itemsize + 2 * results + 4 * (H + 2 * LANES))
    size = block_size(layout, T, min(ROWS, ROWS_BYTES // row_bytes) // G)
    blocks = query_blocks(layout, T, size, share * Z)
    queries = blocks.gather(q, K)
    pools = jax.tree.leaves((k_pages, v_pages))
    sizes = Sizes(
        G=G,
        Z=Z,
        whole=Z * shares,
        M=M,
        pages=pages_at_once(pools, M, 8),
        size=size,
        scale=scale,
        window=window,
        softcap=softcap,
        quantised=isinstance(k_pages, QuantPages),
        sinks=sinks is not None,
        by_token=tpu_values_by_token(H),
        partial=part is not None,
        values=H,
        pools=len(pools),
    )
    found = attend_by_rounds(
        *(_attend, queries, sinks, pools, layout, blocks, sizes),
        name="stoker_attention",
        interpret=interpret,
    )
    out, *lse = (blocks.scatter(rows, layout, T, M * Z * shares) for rows in found)
    return [out, *(row[..., 0] for row in lse)], k_pages, v_pages


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
    K, R = q_ref.shape[1:3]
    Z, whole, n = sizes.Z, sizes.whole, sizes.pages
    seen = visible(R, position, last, start, sizes)
    k_ref, v_ref = buffers[0], buffers[2 if sizes.quantised else 1]
    narrow = all(ref.dtype != jnp.float32 for ref in (q_ref, k_ref))
    work = jnp.bfloat16 if narrow else jnp.float32
    precision = None if narrow else EXACT
    peak_ref, total_ref, sum_ref = sums

    def head(h: Any) -> None:
        queries = q_ref[0, h].astype(work)
        scores = []
        for j in range(n):
            keys = widen(k_ref[j, h], work)
            part = jnp.dot(queries, keys, precision=precision, preferred_element_type=jnp.float32)
            if sizes.quantised:
                part = part * buffers[1][j, pl.ds(h, 1), :]
            scores.append(part)
        score = scores[0] if n == 1 else jnp.concatenate(scores, axis=1)
        score = score * sizes.scale
        if sizes.softcap:
            score = sizes.softcap * jnp.tanh(score / sizes.softcap)
        weights, decay = fold(jnp.where(seen, score, NOTHING), peak_ref.at[h], total_ref.at[h])
        added = sum_ref[h] * decay
        for j in range(n):
            part = weights[:, j * Z : (j + 1) * Z]
            values = widen(v_ref[j, h], work)
            # A weight of zero does not silence a NaN that an earlier owner left in the page.
            axis = 0 if sizes.by_token else 1
            token = start + j * whole + jax.lax.broadcasted_iota(jnp.int32, values.shape, axis)
            values = jnp.where(token <= last, values, jnp.zeros_like(values))
            if sizes.quantised:
                token = start + j * whole + jax.lax.broadcasted_iota(jnp.int32, (1, Z), 1)
                part = part * jnp.where(token <= last, buffers[3][j, pl.ds(h, 1), :], 0)
            added = added + jax.lax.dot_general(
                part.astype(work),
                values,
                (((1,), (axis,)), ((), ())),
                precision=precision,
                preferred_element_type=jnp.float32,
            )
        sum_ref[h] = added

    if K <= 8:
        for h in range(K):
            head(h)
    else:
        pl.loop(0, K)(head)
