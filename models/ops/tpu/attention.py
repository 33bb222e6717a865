"""Attention over ragged pages: prompts and decoding rows in one kernel."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..blocks import block_size, query_blocks
from ..layout import Layout
from ..quant_pages import Pages, QuantPages, tpu_values_by_token
from .append import append
from .common import EXACT, LANES, VMEM_BYTES, in_memory

_MASKED = -1e30
#: Rows of queries (of one KV head) that share a reading of the keys: about where products on the
#: matrix units take as long as the reading does.
ROWS = 256
#: Bytes that all KV heads' rows may take.
ROWS_BYTES = VMEM_BYTES // 2
#: Bytes of pages that are on their way at once: enough to hide the latency of memory.
BLOCK_BYTES = 2 * 2**20


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """What the kernel knows when it is compiled; `pages` are those of a round of its loop."""

    G: int
    Z: int
    M: int
    pages: int
    size: int
    scale: float
    window: int
    softcap: float
    quantised: bool
    sinks: bool
    by_token: bool


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
    k_pages, v_pages = append(k, v, k_pages, v_pages, layout, interpret=interpret)
    T, N, H = q.shape
    K, Z = k_pages.shape[1], k_pages.shape[3]
    M, G = layout.page_table.shape[1], N // K
    # Two copies each of queries and output; peaks, totals and sums.
    row_bytes = K * (4 * H * q.dtype.itemsize + 4 * (H + 2 * LANES))
    size = block_size(layout, T, min(ROWS, ROWS_BYTES // row_bytes) // G)
    blocks = query_blocks(layout, T, size)
    queries = blocks.gather(q, K)
    quantised = isinstance(k_pages, QuantPages)
    sizes = _Sizes(
        G=G,
        Z=Z,
        M=M,
        pages=_pages_at_once(k_pages, v_pages, M),
        size=size,
        scale=scale,
        window=window,
        softcap=softcap,
        quantised=quantised,
        sinks=sinks is not None,
        by_token=tpu_values_by_token(H),
    )
    out = _call(queries, sinks, k_pages, v_pages, layout, blocks, sizes, interpret)
    out = blocks.scatter(out, layout, T, M * Z)
    return out.astype(q.dtype), k_pages, v_pages


def _pages_at_once(k_pages: Pages, v_pages: Pages, M: int) -> int:
    """Pages of a round of the loop."""
    leaves = jax.tree.leaves((k_pages, v_pages))
    page_bytes = sum(leaf.nbytes // leaf.shape[0] for leaf in leaves)
    return max(1, min(BLOCK_BYTES // page_bytes, M, 8))


def _call(
    queries: jax.Array,
    sinks: jax.Array | None,
    k_pages: Pages,
    v_pages: Pages,
    layout: Layout,
    blocks: Any,
    sizes: _Sizes,
    interpret: Any,
) -> jax.Array:
    W, K, R, H = queries.shape
    n = sizes.pages
    pools = jax.tree.leaves((k_pages, v_pages))
    own = pl.BlockSpec((1, K, R, H), lambda w, *_: (w, 0, 0, 0))
    operands, specs = [queries], [own]
    if sinks is not None:
        wide = jnp.broadcast_to(
            sinks.astype(jnp.float32).reshape(K, 1, sizes.G, 1), (K, sizes.size, sizes.G, LANES)
        )
        operands.append(wide.reshape(K, R, LANES))
        specs.append(pl.BlockSpec((K, R, LANES), lambda w, *_: (0, 0, 0)))
    return pl.pallas_call(
        functools.partial(_kernel, sizes=sizes),
        out_shape=jax.ShapeDtypeStruct((W, K, R, H), queries.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(W,),
            in_specs=[*specs, *(pl.BlockSpec(memory_space=pl.ANY) for _ in pools)],
            out_specs=own,
            scratch_shapes=[
                *(pltpu.VMEM((2, n, *pool.shape[1:]), pool.dtype) for pool in pools),
                pltpu.SemaphoreType.DMA((2, len(pools))),
                pltpu.VMEM((K, R, LANES), jnp.float32),
                pltpu.VMEM((K, R, LANES), jnp.float32),
                pltpu.VMEM((K, R, H), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpret,
        name="stoker_attention",
    )(
        blocks.slot,
        blocks.position,
        blocks.count,
        blocks.live,
        layout.page_table.reshape(-1),
        *operands,
        *(in_memory(pool, interpret) for pool in pools),
    )


def _kernel(
    slot_ref: Any,
    position_ref: Any,
    count_ref: Any,
    live_ref: Any,
    table_ref: Any,
    q_ref: Any,
    *refs: Any,
    sizes: _Sizes,
) -> None:
    """One block of queries, `q_ref [1, K, R, H]`."""
    sink_ref, refs = (refs[0], refs[1:]) if sizes.sinks else (None, refs)
    n_pools = 4 if sizes.quantised else 2
    pools, out_ref, buffers = refs[:n_pools], refs[n_pools], refs[n_pools + 1 : 2 * n_pools + 1]
    arrived, peak_ref, total_ref, sum_ref, turn_ref = refs[2 * n_pools + 1 :]
    w = pl.program_id(0)
    live, Z, n = live_ref[0], sizes.Z, sizes.pages

    def span(block: Any) -> tuple[Any, Any]:
        """First and last page that a block of queries sees."""
        position = position_ref[block]
        last = jnp.minimum((position + count_ref[block] - 1) // Z, sizes.M - 1)
        first = jnp.maximum(position - sizes.window + 1, 0) // Z if sizes.window else 0
        return jnp.minimum(first, last), last

    def copies(block: Any, round_: Any, turn: Any, act: Any) -> None:
        """Starts, or awaits, the pages of one round."""
        first, last = span(block)
        for j in range(n):
            index = first + round_ * n + j

            @pl.when(index <= last)
            def _(j: int = j, index: Any = index) -> None:
                page = table_ref[slot_ref[block] * sizes.M + index]
                for which, (pool, buffer) in enumerate(zip(pools, buffers, strict=True)):
                    source, target = pool.at[page], buffer.at[turn, j]
                    act(pltpu.make_async_copy(source, target, arrived.at[turn, which]))

    @pl.when((w == 0) & (live > 0))
    def _() -> None:
        turn_ref[0] = 0
        copies(0, 0, 0, lambda copy: copy.start())

    @pl.when(w < live)
    def _() -> None:
        first, last = span(w)
        rounds = (last - first) // n + 1
        begin = turn_ref[0]
        if sink_ref is None:
            peak_ref[...] = jnp.full(peak_ref.shape, _MASKED, jnp.float32)
            total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
        else:
            peak_ref[...] = sink_ref[...]
            total_ref[...] = jnp.ones(total_ref.shape, jnp.float32)
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)

        def work(round_: Any, _: Any) -> Any:
            turn = (begin + round_) % 2

            @pl.when(round_ + 1 < rounds)
            def _own() -> None:
                copies(w, round_ + 1, 1 - turn, lambda copy: copy.start())

            @pl.when((round_ + 1 == rounds) & (w + 1 < live))
            def _others() -> None:
                copies(w + 1, 0, 1 - turn, lambda copy: copy.start())

            copies(w, round_, turn, lambda copy: copy.wait())
            _attend(
                q_ref,
                [buffer.at[turn] for buffer in buffers],
                (peak_ref, total_ref, sum_ref),
                position_ref[w],
                position_ref[w] + count_ref[w] - 1,
                (first + round_ * n) * Z,
                sizes,
            )
            return 0

        jax.lax.fori_loop(0, rounds, work, 0)
        turn_ref[0] = (begin + rounds) % 2
        total = jnp.maximum(total_ref[...][:, :, :1], 1e-30)
        out_ref[0] = (sum_ref[...] / total).astype(out_ref.dtype)


def _attend(
    q_ref: Any,
    buffers: list[Any],
    sums: tuple[Any, Any, Any],
    position: Any,
    last: Any,
    start: Any,
    sizes: _Sizes,
) -> None:
    """Adds a round of pages, whose first token has position `start`, to the online softmax."""
    K, R = q_ref.shape[1:3]
    Z, n = sizes.Z, sizes.pages
    key = start + jax.lax.broadcasted_iota(jnp.int32, (R, n * Z), 1)
    row = position + jax.lax.broadcasted_iota(jnp.int32, (R, n * Z), 0) // sizes.G
    seen = key <= jnp.minimum(row, last)
    if sizes.window:
        seen &= key > row - sizes.window
    k_ref, v_ref = buffers[0], buffers[2 if sizes.quantised else 1]
    narrow = all(ref.dtype != jnp.float32 for ref in (q_ref, k_ref))
    work = jnp.bfloat16 if narrow else jnp.float32
    precision = None if narrow else EXACT
    peak_ref, total_ref, sum_ref = sums

    def head(h: Any) -> None:
        queries = q_ref[0, h].astype(work)
        scores = []
        for j in range(n):
            keys = _widen(k_ref[j, h], work)
            part = jnp.dot(queries, keys, precision=precision, preferred_element_type=jnp.float32)
            if sizes.quantised:
                part = part * buffers[1][j, pl.ds(h, 1), :]
            scores.append(part)
        score = scores[0] if n == 1 else jnp.concatenate(scores, axis=1)
        score = score * sizes.scale
        if sizes.softcap:
            score = sizes.softcap * jnp.tanh(score / sizes.softcap)
        score = jnp.where(seen, score, _MASKED)
        old_peak = peak_ref[h]
        peak = jnp.maximum(old_peak, score.max(axis=1, keepdims=True))
        decay = jnp.exp(old_peak - peak)
        weights = jnp.exp(score - peak[:, :1])
        peak_ref[h] = peak
        total_ref[h] = total_ref[h] * decay + weights.sum(axis=1, keepdims=True)
        added = sum_ref[h] * decay[:, :1]
        for j in range(n):
            part = weights[:, j * Z : (j + 1) * Z]
            values = _widen(v_ref[j, h], work)
            # A weight of zero does not silence a NaN that an earlier owner left in the page.
            axis = 0 if sizes.by_token else 1
            token = start + j * Z + jax.lax.broadcasted_iota(jnp.int32, values.shape, axis)
            values = jnp.where(token <= last, values, jnp.zeros_like(values))
            if sizes.quantised:
                token = start + j * Z + jax.lax.broadcasted_iota(jnp.int32, (1, Z), 1)
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


def _widen(values: jax.Array, work: Any) -> jax.Array:
    """Numbers of a page as operands of a product; integers pass through float32."""
    if jnp.issubdtype(values.dtype, jnp.integer):
        return values.astype(jnp.float32).astype(work)
    return values.astype(work)
