"""Latent attention over ragged pages for GPUs: one vector is key and value of all heads."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ..blocks import QueryBlocks, block_size, query_blocks
from ..layout import Layout
from ..partial import NOTHING
from ..quant_pages import narrow as narrowed
from .attention import LEAST_ROWS
from .common import EXACT, dot, fold, joined, zero

#: Queries (rows times heads) of a program: with vectors of 576 bfloat16 numbers, these and what is
#: on its way fill the shared memory, and their sums half the registers.
ROWS, FLOAT32_ROWS = 64, 16
#: Tokens that a program takes at once.
TOKENS = 32
#: Programs that run at once: one on each of the 132 multiprocessors of an H100 or H200, whose
#: shared memory has no room for two.
PROGRAMS = 132
#: Least pages of a program's share: float32 sums of 64 queries are as many bytes as two pages.
LEAST_PAGES = 4


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """What the kernel knows when it is compiled; `step` are tokens of a round of its loop.

    A page has `whole` tokens, of which Z are here: positions are relative to the first of these.
    """

    G: int
    Z: int
    whole: int
    M: int
    W: int
    rank: int
    step: int
    splits: int
    scale: float

    @property
    def parts(self) -> tuple[int, int]:
        """Widths of values and of what follows them, padded to what Triton takes."""
        return max(pl.next_power_of_2(self.rank), 16), max(
            pl.next_power_of_2(self.W - self.rank), 16
        )


def latent_attention(
    q: jax.Array,
    latent: jax.Array,
    pages: jax.Array,
    layout: Layout,
    *,
    rank: int,
    scale: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Appends latent vectors to the pages, then attends causally over live pages.

    As `attention`, but that a program has some heads of a block of rows, which all meet the same
    vectors. It reads each once, as key and as value; programs of other heads find it in the cache.

    Args:
      q: `[T, N, W]`: a query in the latent space, then its rotated part.
      latent: `[T, W]`: the normed latent vector, then the rotated key.
      pages: `[P, Z, W]`, Z a power of two from 16 on; donate it, and it is updated in place.
      layout: where the rows sit, as for `attention`.
      rank: R, how many of the W numbers are the value.
      scale: factor on the scores.
      interpret: run the kernel as plain JAX, on any platform.

    Returns:
      Attention output `[T, N, R]` in q's dtype, still in the latent space, and the pages.
    """
    out, _, pages = _latent_attention(
        q, latent, pages, layout, rank=rank, scale=scale, dtype=q.dtype, interpret=interpret
    )
    return out.astype(q.dtype), pages


def partial_latent_attention(
    *arrays: Any, share: jax.Array | int, shares: int, **options: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`latent_attention` over one of `shares` shares of each page's tokens.

    As `xla.partial_latent_attention`; further arguments are those of `latent_attention`.
    """
    return _latent_attention(*arrays, part=(share, shares), dtype=jnp.float32, **options)


def _latent_attention(
    q: jax.Array,
    latent: jax.Array,
    pages: jax.Array,
    layout: Layout,
    *,
    rank: int,
    scale: float,
    dtype: Any,
    interpret: bool = False,
    part: tuple[jax.Array | int, int] = (0, 1),
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Output `[T, N, R]`, of `dtype` or float32, logarithms of sums `[T, N]`, and the pages."""
    share, shares = part
    T, N, W = q.shape
    Z, M = pages.shape[1], layout.page_table.shape[1]
    page, offset = layout.places(T, Z, share, shares)
    pages = pages.at[page, offset].set(narrowed(latent, pages.dtype))

    most = ROWS if all(x.dtype != jnp.float32 for x in (q, pages)) else FLOAT32_ROWS
    parts = _parts(N, most)
    blocks = query_blocks(layout, T, block_size(layout, T, most * parts // N), share * Z)
    queries = blocks.gather(q, parts)
    sizes = _Sizes(
        G=N // parts,
        Z=Z,
        whole=Z * shares,
        M=M,
        W=W,
        rank=rank,
        step=min(Z, TOKENS),
        splits=max(1, min(PROGRAMS // (queries.shape[0] * parts), M // LEAST_PAGES)),
        scale=scale,
    )
    sums, peak, total = _call(queries, pages, layout, blocks, sizes, dtype, interpret)
    if sizes.splits > 1:
        found = joined(sums, peak, total, None, sizes.G)
    else:
        found = sums[0], (peak[0] + jnp.log(jnp.maximum(total[0], 1e-30)))[..., None]
    out, lse = (blocks.scatter(rows, layout, T, M * Z * shares) for rows in found)
    return out, lse[..., 0], pages


def _parts(n_heads: int, most: int) -> int:
    """Into how many equal parts heads are cut, so that one has at most so many."""
    return next(n for n in range(1, n_heads + 1) if n_heads % n == 0 and n_heads // n <= most)


def _call(
    queries: jax.Array,
    pages: jax.Array,
    layout: Layout,
    blocks: QueryBlocks,
    sizes: _Sizes,
    dtype: Any,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums, peaks and totals of each split, block of queries and part of the heads.

    Of a single split, sums are divided by totals already, and of `dtype`.
    """
    W, K, R, _ = queries.shape
    P, splits, rank = pages.shape[0], sizes.splits, sizes.rank
    Rp, Vp = max(pl.next_power_of_2(R), LEAST_ROWS), sizes.parts[0]
    width = max(Vp, rank + sizes.parts[1])

    def whole(array: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec(array.shape, lambda w, h, s: (0,) * array.ndim)

    scalars = (blocks.slot, blocks.position, blocks.count, blocks.live, layout.page_table)
    vector = pl.BlockSpec((None, None, None, Rp), lambda w, h, s: (s, w, h, 0))
    return pl.pallas_call(
        functools.partial(_kernel, sizes=sizes, rows=R),
        out_shape=[
            jax.ShapeDtypeStruct((splits, W, K, R, rank), jnp.float32 if splits > 1 else dtype),
            jax.ShapeDtypeStruct((splits, W, K, R), jnp.float32),
            jax.ShapeDtypeStruct((splits, W, K, R), jnp.float32),
        ],
        grid=(W, K, splits),
        in_specs=[
            *map(whole, scalars),
            pl.BlockSpec((None, None, Rp, width), lambda w, h, s: (w, h, 0, 0)),
            pl.BlockSpec((P, sizes.Z, width), lambda w, h, s: (0, 0, 0)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, Rp, Vp), lambda w, h, s: (s, w, h, 0, 0)),
            vector,
            vector,
        ],
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=2),
        interpret=interpret,
        name="stoker_latent_attention",
    )(*scalars, queries, pages)


def _kernel(
    slot_ref: Any,
    position_ref: Any,
    count_ref: Any,
    live_ref: Any,
    table_ref: Any,
    q_ref: Any,
    pages_ref: Any,
    sum_ref: Any,
    peak_ref: Any,
    total_ref: Any,
    *,
    sizes: _Sizes,
    rows: int,
) -> None:
    """One block of queries (`rows` of them), one part of the heads, one share of the tokens."""
    w, step = pl.program_id(0), sizes.step
    slot, position = slot_ref[w], position_ref[w]
    last = position + count_ref[w] - 1
    last_page = jnp.minimum(last // sizes.whole, sizes.M - 1)
    here = last_page * sizes.Z + jnp.minimum(last - last_page * sizes.whole, sizes.Z - 1)
    # None, or fewer, where all that is here comes later.
    rounds = here // step + 1
    # A share of the rounds for each split; none for a block without rows.
    share = (rounds + sizes.splits - 1) // sizes.splits
    begin = pl.program_id(2) * share
    end = jnp.where(w < live_ref[0], jnp.minimum(begin + share, rounds), begin)

    R = q_ref.shape[0]
    row = jnp.arange(R)
    value, further = (jnp.arange(width) for width in sizes.parts)
    # Rows and lanes that only fill the block lie outside the array.
    lanes = (value < sizes.rank, further < sizes.W - sizes.rank)
    columns = (pl.ds(0, sizes.parts[0]), pl.ds(sizes.rank, sizes.parts[1]))
    narrow = all(ref.dtype != jnp.float32 for ref in (q_ref, pages_ref))
    work = jnp.bfloat16 if narrow else jnp.float32
    precision = None if narrow else EXACT
    queries = [
        plgpu.load(
            q_ref.at[:, part], mask=(row < rows)[:, None] & inside[None, :], other=0.0
        ).astype(work)
        for part, inside in zip(columns, lanes, strict=True)
    ]
    row_position = jnp.minimum(position + row // sizes.G, last)

    def body(index: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        peak, total, weighted = carry
        number, first = index * step // sizes.Z, index * step % sizes.Z
        page, token = table_ref[slot, number], number * sizes.whole + first + jnp.arange(step)
        # A weight of zero does not silence a NaN that an earlier owner left in the page.
        vectors, keys = (
            plgpu.load(
                pages_ref.at[page, pl.ds(first, step), part],
                mask=(token <= last)[:, None] & inside[None, :],
                other=zero(pages_ref),
            )
            for part, inside in zip(columns, lanes, strict=True)
        )
        score = dot(queries[0], vectors.T, work, precision)
        score = (score + dot(queries[1], keys.T, work, precision)) * sizes.scale
        seen = token[None, :] <= row_position[:, None]
        weights, decay, peak, total = fold(score, seen, peak, total)
        added = dot(weights, vectors, work, precision)
        return peak, total, weighted * decay[:, None] + added

    carry = (
        jnp.full((R,), NOTHING, jnp.float32),
        jnp.zeros((R,), jnp.float32),
        jnp.zeros((R, sizes.parts[0]), jnp.float32),
    )
    peak, total, weighted = jax.lax.fori_loop(begin, end, body, carry)
    if sizes.splits == 1:
        weighted = weighted / jnp.maximum(total, 1e-30)[:, None]
    own = (row < rows)[:, None] & lanes[0][None, :]
    plgpu.store(sum_ref, weighted.astype(sum_ref.dtype), mask=own)
    plgpu.store(peak_ref, peak, mask=row < rows)
    plgpu.store(total_ref, total, mask=row < rows)
