"""Runs the pure steps by hand, without the host loop."""

from __future__ import annotations

import functools

import jax
import numpy as np

from stoker.engine import steps
from stoker.engine.cache import Cache, new_cache
from stoker.engine.pages import pages_for
from stoker.engine.sampling_params import SamplingParams
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
    slots = np.arange(len(rows), dtype=np.int32)
    samples = np.array([bool(row) for row in rows])
    return steps.PrefillBatch(tokens, starts, np.array(cached, np.int32), table, slots, samples)


def decoding(active: list[bool], table: np.ndarray) -> steps.DecodeBatch:
    """A decode batch of the slots that are active, as far as their pages go."""
    slots = np.arange(len(active), dtype=np.int32)
    limits = np.where(active, 1 << 20, 0).astype(np.int32)
    return steps.DecodeBatch(table, slots, limits)


def new_state(requests: list[SamplingParams], context: int = 256) -> steps.State:
    """The state of slots of the tiny model."""
    return steps.new_state(requests, 512, context)


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
