"""Runs the pure steps by hand, without the host loop."""

from __future__ import annotations

import functools

import jax
import numpy as np

from stoker.engine import steps
from stoker.engine.cache import Cache, new_cache, pages_for
from stoker.models.config import ModelConfig
from stoker.models.parameters import Params


def page_table(slots: int, pages: int) -> np.ndarray:
    """Pages of each slot, interleaved: neighbours in a sequence are not neighbours in memory."""
    return np.arange(1, slots * pages + 1, dtype=np.int32).reshape(pages, slots).T.copy()


@functools.lru_cache(maxsize=64)
def jitted(step, config: ModelConfig):
    return jax.jit(functools.partial(step, config=config))


def chunk(
    rows: list[list[int]], cached: list[int], table: np.ndarray, size: int | None = None
) -> steps.PrefillBatch:
    """A prefill batch that appends rows[s] to slot s, padded to `size` rows."""
    flat = [token for row in rows for token in row]
    tokens = np.full(size or max(len(flat), 1), 7, np.int32)
    tokens[: len(flat)] = flat
    starts = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    return steps.PrefillBatch(tokens, starts, np.array(cached, np.int32), table)


def prompt_logits(
    params: Params, config: ModelConfig, ids: list[int], size: int, padded: int | None = None
) -> tuple[np.ndarray, Cache]:
    """Logits `[V]` after `ids`, run `size` rows at a time (padded to `padded`), and the cache."""
    pages = pages_for(len(ids) + 64)
    cache, table = new_cache(config, pages), page_table(1, pages)
    run = jitted(steps.prefill_logits, config)
    for start in range(0, len(ids), size):
        batch = chunk([ids[start : start + size]], [start], table, padded or size)
        cache, logits = run(params, cache, batch)
    return np.asarray(logits[0]), cache
