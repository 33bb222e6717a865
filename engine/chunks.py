"""Cuts prompts into the chunks that compiled prefill steps take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .steps import PrefillBatch

#: Rows of the compiled prefill steps; a chunk takes the smallest that holds it.
CHUNKS = (16, 64, 256)


def chunk_batches(
    prompts: Sequence[Sequence[int]],
    cached: Sequence[int],
    page_table: jax.Array,
    sizes: Sequence[int] = CHUNKS,
) -> Iterator[PrefillBatch]:
    """The chunks that bring each slot's cache from `cached` tokens to its whole prompt.

    Prompts follow each other on the flat axis, several to a chunk where they fit; a prompt that
    crosses the end of one goes on in the next.

    Args:
      prompts: tokens of each of the S slots.
      cached: leading tokens of each that are in the cache already.
      page_table: int32 `[S, M]`.
      sizes: rows that a chunk may have, rising.
    """
    done = list(cached)
    left = sum(map(len, prompts)) - sum(done)
    while left:
        room = next((size for size in sizes if size >= left), sizes[-1])
        rows = [0] * len(prompts)
        flat: list[int] = []
        for slot, prompt in enumerate(prompts):
            rows[slot] = min(len(prompt) - done[slot], room - len(flat))
            flat.extend(prompt[done[slot] : done[slot] + rows[slot]])
        yield prefill_batch(flat, rows, done, page_table, room)
        done = [before + count for before, count in zip(done, rows, strict=True)]
        left -= len(flat)


def prefill_batch(
    flat: Sequence[int],
    rows: Sequence[int],
    cached: Sequence[int],
    page_table: jax.Array,
    size: int,
) -> PrefillBatch:
    """A chunk of `size` rows: the tokens `flat`, of which slot s has `rows[s]`, and padding."""
    tokens = np.zeros(size, np.int32)
    tokens[: len(flat)] = flat
    return PrefillBatch(
        tokens=jnp.asarray(tokens),
        query_start=jnp.asarray(np.cumsum([0, *rows]), jnp.int32),
        cached=jnp.asarray(cached, jnp.int32),
        page_table=page_table,
    )
