"""Where the rows of a flat step sit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

#: The page that no sequence reads, so that padding may write to it.
DUMP_PAGE = 0


@struct.dataclass
class Layout:
    """Where each row of a flat step sits. Slot s owns rows query_start[s]:query_start[s+1].

    Rows at or past query_start[S] are padding: if they write, then to `DUMP_PAGE`, and their
    results mean nothing. The last row of a slot has position kv_lens[s] - 1.

    Attributes:
      query_start: int32 `[S+1]`, rising.
      kv_lens: int32 `[S]`, tokens in the slot's cache once this step's are appended.
      page_table: int32 `[S, M]`; position p lives in page page_table[s, p // Z] at offset p % Z.
      max_query: most rows that one slot has in this step (static).
    """

    query_start: jax.Array
    kv_lens: jax.Array
    page_table: jax.Array
    max_query: int = struct.field(pytree_node=False, default=1)

    def rows(self, n_rows: int) -> tuple[jax.Array, jax.Array]:
        """Slot and position of each of T flat rows, int32 `[T]`; padding has position -1."""
        row = jnp.arange(n_rows, dtype=jnp.int32)
        slot = jnp.searchsorted(self.query_start[1:], row, side="right").astype(jnp.int32)
        padding = slot >= self.kv_lens.shape[0]
        slot = jnp.minimum(slot, self.kv_lens.shape[0] - 1)
        from_end = self.query_start[slot + 1] - row
        return slot, jnp.where(padding, -1, self.kv_lens[slot] - from_end)

    def places(
        self, n_rows: int, page_tokens: int, share: jax.Array | int = 0, shares: int = 1
    ) -> tuple[jax.Array, jax.Array]:
        """The page and the offset that each of T flat rows writes to, int32 `[T]`.

        Padding, and rows past the pages of their slot, write to the start of `DUMP_PAGE`. Where a
        page's tokens are in `shares` equal parts of `page_tokens` each, so do the rows that are not
        of this one.
        """
        M = self.page_table.shape[1]
        whole = page_tokens * shares
        slot, position = self.rows(n_rows)
        offset = position % whole - page_tokens * share
        live = (position >= 0) & (position < M * whole) & (offset >= 0) & (offset < page_tokens)
        place = jnp.clip(position // whole, 0, M - 1)
        page = jnp.where(live, self.page_table[slot, place], DUMP_PAGE)
        return page, jnp.where(live, offset, 0)
