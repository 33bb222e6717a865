"""Keys and values of a step appended to their pages, in place."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..blocks import PageVisits, page_visits
from ..layout import Layout
from ..quant_pages import Pages, QuantPages, narrow, quantize_rows, tpu_values_by_token
from .common import EXACT, in_memory, tile_rows


def append(
    k: jax.Array,
    v: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    layout: Layout,
    *,
    share: jax.Array | int = 0,
    shares: int = 1,
    interpret: bool = False,
) -> tuple[Pages, Pages]:
    """Writes this step's keys and values to the pages.

    A tile of a page is the least that can be written, so each page that gets rows is read, changed
    and written back: keys the whole page, values only the tiles around a decode step's row.

    Args:
      k: `[T, K, H]`, rotated.
      v: `[T, K, H]`.
      k_pages: `[P, K, H, Z]`; donate it, and it is updated in place.
      v_pages: `[P, K, *tpu_value_shape(Z, H)]`, likewise.
      layout: where the rows sit; rows past their slot's pages write nothing.
      share: which of `shares` equal parts of each page's tokens the pools hold; rows of others
        write nothing.
      shares: how many there are.
      interpret: run the kernels as plain JAX, on any platform.

    Returns:
      Both page pools.
    """
    T, H, Z = k.shape[0], k.shape[2], k_pages.shape[3]
    visits = page_visits(layout, T, Z, share, shares)
    single = layout.max_query == 1
    put = functools.partial(_put, visits=visits, single=single, interpret=interpret)
    return put(k, k_pages, by_token=False), put(v, v_pages, by_token=tpu_values_by_token(H))


def append_latent(
    rows: jax.Array,
    pages: jax.Array,
    layout: Layout,
    *,
    share: jax.Array | int = 0,
    shares: int = 1,
    interpret: Any = False,
) -> jax.Array:
    """Writes this step's vectors `rows [T, W]` to `pages [P, Z, W]`, or wider, as `append` does.

    What is past W becomes zero.
    """
    T, W = rows.shape
    visits = page_visits(layout, T, pages.shape[1], share, shares)
    rows = jnp.pad(rows, ((0, 0), (0, pages.shape[2] - W)))
    written = _put(
        rows[:, None],
        pages[:, None],
        visits=visits,
        single=layout.max_query == 1,
        by_token=True,
        interpret=interpret,
    )
    # These are floats, which stay one array.
    assert isinstance(written, jax.Array)
    return written[:, 0]


def _put(
    rows: jax.Array,
    pages: Pages,
    *,
    visits: PageVisits,
    single: bool,
    by_token: bool,
    interpret: bool,
) -> Pages:
    """`rows [T, K, H]` in `pages`, whose tokens are the third axis or (`not by_token`) the last."""
    token_axis = 2 if by_token else 3
    call = functools.partial(_place, visits=visits, single=single, interpret=interpret)
    if not isinstance(pages, QuantPages):
        return call(narrow(rows, pages.dtype), pages, token_axis=token_axis)
    codes, scale = quantize_rows(rows)
    return QuantPages(
        codes=call(codes, pages.codes, token_axis=token_axis),
        # A row of one element: `[T, K, 1]` into `[P, K, 1, Z]`.
        scale=call(scale[..., None], pages.scale[:, :, None], token_axis=3)[:, :, 0],
    )


def _place(
    rows: jax.Array,
    pages: jax.Array,
    *,
    visits: PageVisits,
    single: bool,
    token_axis: int,
    interpret: bool,
) -> jax.Array:
    """`rows [T, K, H]`, of the pages' type, put into pages of that token axis."""
    T, K, H = rows.shape
    Z = pages.shape[token_axis]
    by_token = token_axis == 2
    # Products with ones and zeros put rows in their places; those of narrow types are exact.
    work = jnp.float32 if rows.dtype == jnp.float32 else jnp.bfloat16
    # Rows of a block: a page's share lies in two neighbouring ones.
    block = min(16 if single else Z, max(-(-T // 16) * 16, 16))
    padded = jnp.pad(rows.astype(work).swapaxes(0, 1), ((0, 0), (0, -T % block), (0, 0)))
    last = padded.shape[1] // block - 1
    # Tokens of a tile, where a visit writes one row only.
    tokens = min(tile_rows(pages.dtype), Z) if single and by_token and Z % 32 == 0 else Z
    page_block = (1, K, tokens, H) if by_token else (1, K, H, tokens)

    def page_index(visit: Any, page: Any, row: Any, offset: Any, count: Any) -> tuple[Any, ...]:
        part = offset[visit] // tokens
        return (page[visit], 0, part, 0) if by_token else (page[visit], 0, 0, part)

    def rows_index(further: int, visit: Any, page: Any, row: Any, *_: Any) -> tuple[Any, ...]:
        return 0, jnp.minimum(row[visit] // block + further, last), 0

    several = 1 if single or last == 0 else 2
    kernel = functools.partial(
        _kernel, block=block, tokens=tokens, by_token=by_token, several=several, last=last
    )
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(visits.page.shape[0],),
            in_specs=[
                *(
                    pl.BlockSpec((K, block, H), functools.partial(rows_index, further))
                    for further in range(several)
                ),
                pl.BlockSpec(page_block, page_index),
            ],
            out_specs=pl.BlockSpec(page_block, page_index),
        ),
        input_output_aliases={4 + several: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="stoker_append",
    )(
        visits.page,
        visits.row,
        visits.offset,
        visits.count,
        *[padded] * several,
        in_memory(pages, interpret),
    )


def _kernel(
    page_ref: jax.Array,
    row_ref: jax.Array,
    offset_ref: jax.Array,
    count_ref: jax.Array,
    *refs: jax.Array,
    block: int,
    tokens: int,
    by_token: bool,
    several: int,
    last: int,
) -> None:
    *row_blocks, old_ref, new_ref = refs
    visit = pl.program_id(0)
    row, count = row_ref[visit], count_ref[visit]
    offset = offset_ref[visit] % tokens
    K = old_ref.shape[1]

    # Row r of a block goes to token `offset + r - row`, if it is one of the visit's.
    shape = (tokens, block) if by_token else (block, tokens)
    token = jax.lax.broadcasted_iota(jnp.int32, shape, 0 if by_token else 1)
    index = jax.lax.broadcasted_iota(jnp.int32, shape, 1 if by_token else 0)
    own_row = jax.lax.broadcasted_iota(jnp.int32, (block, 1), 0)
    taken = jax.lax.broadcasted_iota(
        jnp.int32, (tokens, 1) if by_token else (1, tokens), 1 - by_token
    )
    taken = (taken >= offset) & (taken < offset + count)

    for head in range(K):
        placed = jnp.zeros((1, 1), jnp.float32)
        for further, ref in enumerate(row_blocks):
            first = jnp.minimum(row // block + further, last) * block
            # The second block is the first one again at the end of the rows: count it once.
            fresh = (row // block + further) <= last
            inside = (own_row + first >= row) & (own_row + first < row + count) & fresh
            # A NaN of a neighbour's row must not get here, not even times zero.
            values = jnp.where(inside, ref[head].astype(jnp.float32), 0.0).astype(ref.dtype)
            hot = (token - offset == index + first - row).astype(jnp.float32).astype(ref.dtype)
            precision = EXACT if ref.dtype == jnp.float32 else None
            if by_token:
                part = jnp.dot(hot, values, precision=precision, preferred_element_type=jnp.float32)
            else:
                part = jax.lax.dot_general(
                    values,
                    hot,
                    (((0,), (0,)), ((), ())),
                    precision=precision,
                    preferred_element_type=jnp.float32,
                )
            placed = placed + part
        old = old_ref[0, head]
        wide = jnp.where(taken, placed, old.astype(jnp.float32))
        new_ref[0, head] = wide.astype(old.dtype)
