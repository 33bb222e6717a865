"""Blocks of queries over rounds of pages, which are copied while others are worked on."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..blocks import QueryBlocks
from ..layout import Layout
from ..partial import NOTHING
from .common import LANES, VMEM_BYTES, in_memory

#: Bytes of pages that are on their way at once: enough to hide the latency of memory.
BLOCK_BYTES = 2 * 2**20

#: Adds a round of pages to the online softmax. Is given the queries `[1, K, R, H]`, a round of each
#: array of pages `[pages, ...]`, what the softmax has so far (peaks and totals `[K, R, 128]`, sums
#: `[K, R, values]`), the positions of the block's first and last row and of the round's first
#: token, and `Sizes`.
Attend = Callable[..., None]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the kernel knows when it is compiled; `pages` are those of a round of its loop.

    A page has `whole` tokens, of which Z are here: positions are relative to the first of these.
    What is summed up has the width `values`; `pools` are arrays of pages.
    """

    G: int
    Z: int
    whole: int
    M: int
    pages: int
    size: int
    scale: float
    window: int
    softcap: float
    quantised: bool
    sinks: bool
    by_token: bool
    partial: bool
    values: int
    pools: int


def pages_at_once(pools: Sequence[jax.Array], M: int, most: int) -> int:
    """Pages of a round of the loop, of the M that a slot has."""
    page_bytes = sum(pool.nbytes // pool.shape[0] for pool in pools)
    return max(1, min(BLOCK_BYTES // page_bytes, M, most))


def attend_by_rounds(
    attend: Attend,
    queries: jax.Array,
    sinks: jax.Array | None,
    pools: Sequence[jax.Array],
    layout: Layout,
    blocks: QueryBlocks,
    sizes: Sizes,
    *,
    name: str,
    interpret: Any,
) -> list[jax.Array]:
    """Attention of `queries [W, K, R, H]`, in blocks, over pages that have the step's rows already.

    Pages before the window of a block or behind its last row are not read. While one round of pages
    is worked on the next is on its way, also that of the next block.

    Returns:
      Output `[W, K, R, values]` and, of a part, logarithms of sums `[W, K, R, 1]`.
    """
    W, K, R, H = queries.shape
    n, V = sizes.pages, sizes.values

    def own(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, K, R, width), lambda w, *_: (w, 0, 0, 0))

    operands, specs = [queries], [own(H)]
    if sinks is not None:
        wide = jnp.broadcast_to(
            sinks.astype(jnp.float32).reshape(K, 1, sizes.G, 1), (K, sizes.size, sizes.G, LANES)
        )
        operands.append(wide.reshape(K, R, LANES))
        specs.append(pl.BlockSpec((K, R, LANES), lambda w, *_: (0, 0, 0)))
    shapes = [jax.ShapeDtypeStruct((W, K, R, V), jnp.float32 if sizes.partial else queries.dtype)]
    results = [own(V)]
    if sizes.partial:
        shapes.append(jax.ShapeDtypeStruct((W, K, R, LANES), jnp.float32))
        results.append(own(LANES))
    out, *lse = pl.pallas_call(
        functools.partial(_kernel, attend=attend, sizes=sizes),
        out_shape=shapes,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(W,),
            in_specs=[*specs, *(pl.BlockSpec(memory_space=pl.ANY) for _ in pools)],
            out_specs=results,
            scratch_shapes=[
                *(pltpu.VMEM((2, n, *pool.shape[1:]), pool.dtype) for pool in pools),
                pltpu.SemaphoreType.DMA((2, len(pools))),
                pltpu.VMEM((K, R, LANES), jnp.float32),
                pltpu.VMEM((K, R, LANES), jnp.float32),
                pltpu.VMEM((K, R, V), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpret,
        name=name,
    )(
        blocks.slot,
        blocks.position,
        blocks.count,
        blocks.live,
        layout.page_table.reshape(-1),
        *operands,
        *(in_memory(pool, interpret) for pool in pools),
    )
    return [out, *(lanes[..., :1] for lanes in lse)]


def _kernel(
    slot_ref: Any,
    position_ref: Any,
    count_ref: Any,
    live_ref: Any,
    table_ref: Any,
    q_ref: Any,
    *refs: Any,
    attend: Attend,
    sizes: Sizes,
) -> None:
    """One block of queries, `q_ref [1, K, R, H]`."""
    sink_ref, refs = (refs[0], refs[1:]) if sizes.sinks else (None, refs)
    n_pools = sizes.pools
    pools, out_ref, refs = refs[:n_pools], refs[n_pools], refs[n_pools + 1 :]
    lse_ref, refs = (refs[0], refs[1:]) if sizes.partial else (None, refs)
    buffers, (arrived, peak_ref, total_ref, sum_ref, turn_ref) = refs[:n_pools], refs[n_pools:]
    w = pl.program_id(0)
    live, Z, whole, n = live_ref[0], sizes.Z, sizes.whole, sizes.pages

    def span(block: Any) -> tuple[Any, Any]:
        """First and last page that a block of queries sees; in disorder if there are none."""
        position = position_ref[block]
        last = jnp.minimum((position + count_ref[block] - 1) // whole, sizes.M - 1)
        if not sizes.window:
            return 0, last
        # Of the page before, what is here lies before the window.
        return jnp.maximum(position - sizes.window + 1 + whole - Z, 0) // whole, last

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
        # One at least, which awaits nothing and adds nothing where there is no page.
        rounds = jnp.maximum((last - first) // n + 1, 1)
        begin = turn_ref[0]
        if sink_ref is None:
            peak_ref[...] = jnp.full(peak_ref.shape, NOTHING, jnp.float32)
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
            attend(
                q_ref,
                [buffer.at[turn] for buffer in buffers],
                (peak_ref, total_ref, sum_ref),
                position_ref[w],
                position_ref[w] + count_ref[w] - 1,
                (first + round_ * n) * whole,
                sizes,
            )
            return 0

        jax.lax.fori_loop(0, rounds, work, 0)
        turn_ref[0] = (begin + rounds) % 2
        total = jnp.maximum(total_ref[...][:, :, :1], 1e-30)
        out_ref[0] = (sum_ref[...] / total).astype(out_ref.dtype)
        if lse_ref is not None:
            lse_ref[0] = peak_ref[...] + jnp.log(jnp.maximum(total_ref[...], 1e-30))


def visible(R: int, position: Any, last: Any, start: Any, sizes: Sizes) -> jax.Array:
    """Which keys of a round each of R rows sees, bool `[R, pages * Z]`."""
    shape = (R, sizes.pages * sizes.Z)
    token = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    key = start + token
    if sizes.whole > sizes.Z:
        key = key + token // sizes.Z * (sizes.whole - sizes.Z)
    row = position + jax.lax.broadcasted_iota(jnp.int32, shape, 0) // sizes.G
    seen = key <= jnp.minimum(row, last)
    return seen & (key > row - sizes.window) if sizes.window else seen


def fold(score: jax.Array, peak_ref: Any, total_ref: Any) -> tuple[jax.Array, jax.Array]:
    """Takes scores `[R, C]` into the softmax; those that do not count are `NOTHING`.

    Returns:
      Weights `[R, C]`, and what earlier sums shrink by, `[R, 1]`.
    """
    old_peak = peak_ref[...]
    peak = jnp.maximum(old_peak, score.max(axis=1, keepdims=True))
    decay = jnp.exp(old_peak - peak)
    weights = jnp.exp(score - peak[:, :1])
    peak_ref[...] = peak
    total_ref[...] = total_ref[...] * decay + weights.sum(axis=1, keepdims=True)
    return weights, decay[:, :1]


def widen(values: jax.Array, work: Any) -> jax.Array:
    """Numbers of a page as operands of a product; integers pass through float32."""
    if jnp.issubdtype(values.dtype, jnp.integer):
        return values.astype(jnp.float32).astype(work)
    return values.astype(work)
