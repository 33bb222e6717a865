"""A ragged step cut into work of even size: blocks of a slot's queries, pages that it fills."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .layout import DUMP_PAGE, Layout


@dataclasses.dataclass(frozen=True)
class QueryBlocks:
    """Rows of a step in W blocks, none of which spans two slots. The first `live[0]` have rows.

    Attributes:
      slot: int32 `[W]`.
      row: int32 `[W]`, the first row.
      position: int32 `[W]`, its position, from where `query_blocks` counts.
      count: int32 `[W]`, rows of the block.
      live: int32 `[1]`.
      size: most rows of a block (static).
    """

    slot: jax.Array
    row: jax.Array
    position: jax.Array
    count: jax.Array
    live: jax.Array
    size: int

    def rows(self, n_rows: int) -> jax.Array:
        """int32 `[W, size]`: the rows of each block, then further ones that are not the block's."""
        return jnp.minimum(self.row[:, None] + jnp.arange(self.size), n_rows - 1)

    def gather(self, x: jax.Array, n_kv_heads: int) -> jax.Array:
        """Rows `x [T, N, H]` as `[W, K, R, H]`: those of a KV head, R = size * N / K, together."""
        T, N, H = x.shape
        G = N // n_kv_heads
        blocks = x[self.rows(T)].reshape(-1, self.size, n_kv_heads, G, H)
        return blocks.swapaxes(1, 2).reshape(-1, n_kv_heads, self.size * G, H)

    def scatter(self, blocks: jax.Array, layout: Layout, n_rows: int, full: int) -> jax.Array:
        """What `gather` cut, `[W, K, R, H]`, as rows `[T, N, H]`.

        Padding rows are zeros, and those at the position `full` or past it NaN.
        """
        K, R, H = blocks.shape[1:]
        G = R // self.size
        rows = blocks.reshape(-1, K, self.size, G, H).swapaxes(1, 2).reshape(-1, K * G, H)
        rows = rows[self.places(layout, n_rows)]
        position = layout.rows(n_rows)[1][:, None, None]
        return jnp.where(position < 0, 0, jnp.where(position >= full, jnp.nan, rows))

    def places(self, layout: Layout, n_rows: int) -> jax.Array:
        """int32 `[T]`: which of the W * size places of all blocks each row has; padding, any."""
        slot, _ = layout.rows(n_rows)
        rank = jnp.arange(n_rows, dtype=jnp.int32) - layout.query_start[slot]
        first = _ends(layout, self.size)[slot] - _blocks(layout, self.size)[slot]
        places = self.slot.shape[0] * self.size
        return jnp.clip(first * self.size + rank, 0, places - 1)


def block_size(layout: Layout, n_rows: int, most: int) -> int:
    """Rows of a block: a power of two up to `most`, and no more than a slot's even share of rows.

    So blocks hold at most twice the step's rows, or one row each where every slot has one.
    """
    S = layout.kv_lens.shape[0]
    wanted = min(layout.max_query, max(n_rows // S, 1), max(most, 1))
    return 1 << (wanted.bit_length() - 1)


def query_blocks(
    layout: Layout, n_rows: int, size: int, origin: jax.Array | int = 0
) -> QueryBlocks:
    """The step's rows in blocks of at most `size`; positions are relative to `origin`."""
    S = layout.kv_lens.shape[0]
    owners = min(S, n_rows)
    W = owners + (n_rows - owners) // size
    ends = _ends(layout, size)
    block = jnp.arange(W, dtype=jnp.int32)
    slot = jnp.searchsorted(ends, block, side="right").astype(jnp.int32)
    slot = jnp.minimum(slot, S - 1)
    index = block - (ends - _blocks(layout, size))[slot]
    row = layout.query_start[slot] + index * size
    end = layout.query_start[slot + 1]
    return QueryBlocks(
        slot=slot,
        row=row,
        position=layout.kv_lens[slot] - (end - row) - origin,
        count=jnp.clip(end - row, 0, size),
        live=ends[-1:],
        size=size,
    )


def _blocks(layout: Layout, size: int) -> jax.Array:
    """int32 `[S]`: blocks of each slot."""
    return (jnp.diff(layout.query_start) + size - 1) // size


def _ends(layout: Layout, size: int) -> jax.Array:
    return jnp.cumsum(_blocks(layout, size)).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class PageVisits:
    """The pages that a step writes to, each once; those past the last go to the dump page.

    Attributes:
      page: int32 `[A]`.
      row: int32 `[A]`, the first row that the page takes.
      offset: int32 `[A]`, where in the page that row goes.
      count: int32 `[A]`, rows that it takes.
    """

    page: jax.Array
    row: jax.Array
    offset: jax.Array
    count: jax.Array


def page_visits(
    layout: Layout,
    n_rows: int,
    page_tokens: int,
    share: jax.Array | int = 0,
    shares: int = 1,
) -> PageVisits:
    """The pages that the step's rows are appended to, slot by slot.

    Rows past the last page of their slot's table are left out, and where a page's tokens are in
    `shares` parts of `page_tokens` each, so are those of other parts.
    """
    S, M = layout.page_table.shape
    Z, whole = page_tokens, page_tokens * shares
    rows = jnp.diff(layout.query_start)
    first = layout.kv_lens - rows
    last = jnp.minimum(layout.kv_lens, M * whole) - 1
    pages = jnp.where((rows > 0) & (last >= first), last // whole - first // whole + 1, 0)
    ends = jnp.cumsum(pages).astype(jnp.int32)
    # n rows touch (n - 2) // whole + 2 pages at most, and no more than n.
    owners = min(S, n_rows)
    A = owners if layout.max_query == 1 else min(n_rows, n_rows // whole + 2 * owners)
    visit = jnp.arange(A, dtype=jnp.int32)
    slot = jnp.minimum(jnp.searchsorted(ends, visit, side="right").astype(jnp.int32), S - 1)
    number = first[slot] // whole + visit - (ends - pages)[slot]
    begin = number * whole + share * Z
    start, end = jnp.maximum(begin, first[slot]), jnp.minimum(begin + Z, last[slot] + 1)
    live = (visit < ends[-1]) & (start < end)
    page = layout.page_table[slot, jnp.clip(number, 0, M - 1)]
    return PageVisits(
        page=jnp.where(live, page, DUMP_PAGE),
        row=jnp.where(live, layout.query_start[slot] + start - first[slot], 0),
        offset=jnp.where(live, start - begin, 0),
        count=jnp.where(live, end - start, 0),
    )
