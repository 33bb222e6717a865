"""Rows sorted by group, cut into blocks: which group's matrix each block of rows meets."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Visits:
    """Blocks of rows that meet a group's matrix: int32 `[V]` each.

    Attributes:
      group: whose matrix.
      tile: which block of rows.
      first: first row of the group in the block.
      last: the row after its last one; `first` for a visit that is none.
    """

    group: jax.Array
    tile: jax.Array
    first: jax.Array
    last: jax.Array


def one_group(n_rows: int, rows: int) -> Visits:
    """All of T rows are of one group, in blocks of `rows`."""
    tiles = -(-n_rows // rows)
    number = jnp.arange(tiles, dtype=jnp.int32)
    return Visits(
        group=jnp.zeros(tiles, jnp.int32),
        tile=number,
        first=number * rows,
        last=jnp.minimum((number + 1) * rows, n_rows),
    )


def group_visits(sizes: jax.Array, n_rows: int, rows: int) -> Visits:
    """The first `sizes[0]` of T rows are of group 0, and so on, in blocks of `rows`.

    A group without rows has no visit. Visits go block by block; those past the last repeat it
    without rows, so that a kernel which reads what a visit names reads nothing further.
    """
    E = sizes.shape[0]
    end = jnp.cumsum(sizes).astype(jnp.int32)
    start = end - sizes
    counts = jnp.where(sizes > 0, (end - 1) // rows - start // rows + 1, 0)
    ends = jnp.cumsum(counts).astype(jnp.int32)
    V = -(-n_rows // rows) + min(E, n_rows) - 1
    visit = jnp.arange(V, dtype=jnp.int32)
    real = jnp.minimum(visit, ends[-1] - 1)
    group = jnp.searchsorted(ends, real, side="right").astype(jnp.int32)
    group = jnp.clip(group, 0, E - 1)
    tile = jnp.maximum(start[group] // rows + real - (ends - counts)[group], 0)
    first = jnp.maximum(start[group], tile * rows)
    last = jnp.minimum(end[group], (tile + 1) * rows)
    return Visits(group, tile, first, jnp.where(visit < ends[-1], last, first))


def heads_as_groups(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`x [T, N, C]` as rows `[N * T, C]` sorted by head, and how many each has, int32 `[N]`."""
    T, N, C = x.shape
    return x.swapaxes(0, 1).reshape(N * T, C), jnp.full(N, T, jnp.int32)


def groups_as_heads(rows: jax.Array, n_heads: int) -> jax.Array:
    """Rows `[N * T, R]` sorted by head as `[T, N, R]`."""
    return rows.reshape(n_heads, -1, rows.shape[-1]).swapaxes(0, 1)


def halves(x: jax.Array, span: int) -> list[jax.Array]:
    """Columns of `x [T, C]` that meet the low and the high halves of bytes: `[T, C/2]` each.

    In a group of `span` bytes (see `QuantArray`), byte j holds columns j and j + span.
    """
    T, C = x.shape
    split = x.reshape(T, C // (2 * span), 2, span)
    return [split[:, :, half].reshape(T, C // 2) for half in range(2)]
