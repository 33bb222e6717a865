"""Attention over ragged pages for GPUs: prompts, and decoding rows whose pages are split."""

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
from ..quant_pages import Pages, QuantPages, store
from .common import EXACT, dot, fold, joined, zero

#: Rows of queries (of one KV head) of a program; a product of the tensor cores takes 16 or more.
ROWS, LEAST_ROWS = 64, 16
#: Programs that keep a GPU busy: about two to each of the 132 multiprocessors of an H100 or H200.
PROGRAMS = 264


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """What the kernel knows when it is compiled; H is the width as it is, not padded.

    A page has `whole` tokens, of which Z are here: positions are relative to the first of these.
    """

    G: int
    H: int
    Z: int
    whole: int
    M: int
    splits: int
    scale: float
    window: int
    softcap: float
    quantised: bool


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
    interpret: bool = False,
) -> tuple[jax.Array, Pages, Pages]:
    """Appends this step's keys and values to the pages, then attends causally over live pages.

    The online softmax of FlashAttention (Dao et al. 2022). A program has a block of one slot's
    rows and one KV head. Where those are too few to fill the GPU, the pages of a block are split
    between programs, whose sums are joined afterwards (Flash-Decoding, Dao et al. 2023). Pages
    before the window of a block or behind its last row are not read.

    Scores and sums are float32. Operands of products are float32 where q or the pages are, else
    bfloat16: so are the weights of values then.

    Args:
      q: `[T, N, H]`, rotated.
      k: `[T, K, H]`, rotated.
      v: `[T, K, H]`.
      k_pages: `[P, K, H, Z]`, Z a power of two from 16 on; donate it, and it is updated in place.
      v_pages: `[P, K, Z, H]`, likewise.
      layout: where the rows sit. A row past the M * Z tokens of its pages writes nothing, and its
        output is NaN; padding rows yield zeros.
      scale: factor on the scores, usually H ** -0.5.
      sinks: float32 `[N]`, one more score for each query head, without a value; None for none.
      window: tokens that a row sees, itself included; 0 for all.
      softcap: scores become softcap * tanh(score / softcap); 0 for none.
      interpret: run the kernel as plain JAX, on any platform.

    Returns:
      Attention output `[T, N, H]` in q's dtype, and both page pools.
    """
    out, _, k_pages, v_pages = _attention(
        *(q, k, v, k_pages, v_pages, layout),
        sinks=sinks,
        scale=scale,
        window=window,
        softcap=softcap,
        interpret=interpret,
    )
    return out.astype(q.dtype), k_pages, v_pages


def partial_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    layout: Layout,
    *,
    share: jax.Array | int,
    shares: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, Pages, Pages]:
    """`attention` over one of `shares` shares of each page's tokens; as `xla.partial_attention`.

    Further arguments are those of `attention`.
    """
    return _attention(
        *(q, k, v, k_pages, v_pages, layout),
        sinks=None,
        scale=scale,
        window=window,
        softcap=softcap,
        interpret=interpret,
        share=share,
        shares=shares,
    )


def _attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    layout: Layout,
    *,
    sinks: jax.Array | None,
    scale: float,
    window: int,
    softcap: float,
    interpret: bool,
    share: jax.Array | int = 0,
    shares: int = 1,
) -> tuple[jax.Array, jax.Array, Pages, Pages]:
    """Output float32 `[T, N, H]`, logarithms of sums `[T, N]`, and both page pools."""
    T, N, H = q.shape
    K, Z = k_pages.shape[1], k_pages.shape[3]
    M, G = layout.page_table.shape[1], N // K
    page, offset = layout.places(T, Z, share, shares)
    k_pages = store(k_pages, k, page, offset, token_axis=3)
    v_pages = store(v_pages, v, page, offset, token_axis=2)

    blocks = query_blocks(layout, T, block_size(layout, T, ROWS // G), share * Z)
    queries = blocks.gather(q, K)
    sizes = _Sizes(
        G=G,
        H=H,
        Z=Z,
        whole=Z * shares,
        M=M,
        splits=max(1, min(-(-PROGRAMS // (queries.shape[0] * K)), M)),
        scale=scale,
        window=window,
        softcap=softcap,
        quantised=isinstance(k_pages, QuantPages),
    )
    sums, peak, total = _call(queries, k_pages, v_pages, layout, blocks, sizes, interpret)
    found = joined(sums, peak, total, sinks, G)
    out, lse = (blocks.scatter(part, layout, T, M * Z * shares) for part in found)
    return out, lse[..., 0], k_pages, v_pages


def _call(
    queries: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    layout: Layout,
    blocks: QueryBlocks,
    sizes: _Sizes,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums, peaks and totals of each split, block of queries and KV head."""
    W, K, R, H = queries.shape
    Rp, Hp = max(pl.next_power_of_2(R), LEAST_ROWS), max(pl.next_power_of_2(H), 16)
    P, Z, splits = k_pages.shape[0], sizes.Z, sizes.splits

    def whole(array: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec(array.shape, lambda w, h, s: (0,) * array.ndim)

    def pool(pages: Pages, *shape: int) -> list[pl.BlockSpec]:
        spec = pl.BlockSpec((P, None, *shape), lambda w, h, s: (0, h, 0, 0))
        scale = pl.BlockSpec((P, None, Z), lambda w, h, s: (0, h, 0))
        return [spec, scale] if sizes.quantised else [spec]

    scalars = (blocks.slot, blocks.position, blocks.count, blocks.live, layout.page_table)
    vector = pl.BlockSpec((None, None, None, Rp), lambda w, h, s: (s, w, h, 0))
    return pl.pallas_call(
        functools.partial(_kernel, sizes=sizes, rows=R),
        out_shape=[
            jax.ShapeDtypeStruct((splits, W, K, R, H), jnp.float32),
            jax.ShapeDtypeStruct((splits, W, K, R), jnp.float32),
            jax.ShapeDtypeStruct((splits, W, K, R), jnp.float32),
        ],
        grid=(W, K, splits),
        in_specs=[
            *map(whole, scalars),
            pl.BlockSpec((None, None, Rp, Hp), lambda w, h, s: (w, h, 0, 0)),
            *pool(k_pages, Hp, Z),
            *pool(v_pages, Z, Hp),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, Rp, Hp), lambda w, h, s: (s, w, h, 0, 0)),
            vector,
            vector,
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="stoker_attention",
    )(*scalars, queries, *jax.tree.leaves(k_pages), *jax.tree.leaves(v_pages))


def _kernel(
    slot_ref: Any,
    position_ref: Any,
    count_ref: Any,
    live_ref: Any,
    table_ref: Any,
    q_ref: Any,
    *refs: Any,
    sizes: _Sizes,
    rows: int,
) -> None:
    """One block of queries (`rows` of them), one KV head, one share of the pages."""
    *pools, sum_ref, peak_ref, total_ref = refs
    k_ref, v_ref = pools[0], pools[2 if sizes.quantised else 1]
    w, Z, whole = pl.program_id(0), sizes.Z, sizes.whole
    R, H, Hp = q_ref.shape[0], sizes.H, q_ref.shape[1]
    slot, position = slot_ref[w], position_ref[w]
    last = position + count_ref[w] - 1
    last_page = jnp.minimum(last // whole, sizes.M - 1)
    first_page: Any = 0
    if sizes.window:
        # Of the page before, what is here lies before the window.
        first_page = jnp.maximum(position - sizes.window + 1 + whole - Z, 0) // whole
    # A share of the pages for each split; none for a block without rows.
    share = (last_page - first_page + sizes.splits) // sizes.splits
    begin = first_page + pl.program_id(2) * share
    end = jnp.where(w < live_ref[0], jnp.minimum(begin + share, last_page + 1), begin)

    lane = jnp.arange(Hp)
    row = jnp.arange(R)
    # Rows and lanes that only fill the block lie outside the array.
    inside = (row < rows)[:, None] & (lane < H)[None, :]
    narrow = q_ref.dtype != jnp.float32 and k_ref.dtype != jnp.float32
    work = jnp.bfloat16 if narrow else jnp.float32
    precision = None if narrow else EXACT
    queries = plgpu.load(q_ref, mask=inside, other=0.0).astype(work)
    row_position = jnp.minimum(position + row // sizes.G, last)

    def body(index: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        peak, total, weighted = carry
        page = table_ref[slot, index]
        key = index * whole + jnp.arange(Z)
        keys = plgpu.load(k_ref.at[page], mask=(lane < H)[:, None], other=zero(k_ref))
        score = dot(queries, keys, work, precision)
        if sizes.quantised:
            score = score * pools[1][page][None, :]
        score = score * sizes.scale
        if sizes.softcap:
            score = sizes.softcap * jnp.tanh(score / sizes.softcap)
        seen = key[None, :] <= row_position[:, None]
        if sizes.window:
            seen &= key[None, :] > row_position[:, None] - sizes.window
        weights, decay, peak, total = fold(score, seen, peak, total)
        # A weight of zero does not silence a NaN that an earlier owner left in the page.
        written = (key <= last)[:, None] & (lane < H)[None, :]
        values = plgpu.load(v_ref.at[page], mask=written, other=zero(v_ref))
        if sizes.quantised:
            weights = weights * jnp.where(key <= last, pools[3][page], 0)[None, :]
        added = dot(weights, values, work, precision)
        return peak, total, weighted * decay[:, None] + added

    carry = (
        jnp.full((R,), NOTHING, jnp.float32),
        jnp.zeros((R,), jnp.float32),
        jnp.zeros((R, Hp), jnp.float32),
    )
    peak, total, weighted = jax.lax.fori_loop(begin, end, body, carry)
    plgpu.store(sum_ref, weighted, mask=inside)
    plgpu.store(peak_ref, peak, mask=row < rows)
    plgpu.store(total_ref, total, mask=row < rows)
