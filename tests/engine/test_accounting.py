"""Byte and operation counts against counting by hand."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from tiny import TINY, random_params

from stoker.engine.accounting import memory_bandwidth, peak_memory, step_cost
from stoker.engine.cache import new_cache, token_bytes

MATRICES = 2 * (2 * 64 * 64 + 2 * 64 * 16 + 3 * 64 * 160)
NORMS = 5 * 64


def test_decode_step_by_hand() -> None:
    cost = step_cost(TINY, random_params(TINY), [100, 20])
    assert cost.weights == 4 * (MATRICES + NORMS + 512 * 64) + 2 * 64 * 4
    assert cost.kv_read == 120 * 2 * 2 * 16 * 4
    assert cost.kv_write == 2 * 2 * 2 * 16 * 4
    assert cost.logits == 2 * 512 * 4
    assert cost.bytes == cost.weights + cost.kv_read + cost.kv_write + cost.logits
    products = 2 * 2 * (MATRICES + NORMS + 512 * 64)
    assert cost.operations == products + 4 * 2 * 8 * 8 * 120


def test_tied_head_is_read_once() -> None:
    tied = dataclasses.replace(TINY, tied_head=True)
    untied, cost = (step_cost(c, random_params(c), [10]) for c in (TINY, tied))
    assert cost.weights == untied.weights
    assert cost.operations == untied.operations


@pytest.mark.parametrize("rows", [1, 3])
def test_experts_that_nobody_picks_cost_nothing(rows: int) -> None:
    routed = dataclasses.replace(TINY, n_experts=8, experts_per_token=2, mlp_bias=True)
    params = random_params(routed)
    cost = step_cost(routed, params, [100.0] * rows)
    every = step_cost(dataclasses.replace(routed, experts_per_token=8), params, [100.0] * rows)
    one = 3 * 64 * 160 + 160 + 160 + 64
    assert every.weights - cost.weights == pytest.approx(2 * 8 * one * 4 * 0.75**rows)
    assert every.operations - cost.operations == pytest.approx(2 * 2 * rows * 6 * one)


def test_token_bytes_are_what_the_cache_takes() -> None:
    for dtype in ("float32", "bfloat16"):
        config = dataclasses.replace(TINY, kv_dtype=dtype)
        cache = new_cache(config, 9, 16)
        total = sum(pages.nbytes for pages in jax.tree.leaves(cache))
        assert total == 160 * token_bytes(config)


def test_this_machine_is_measured() -> None:
    speed, source = memory_bandwidth(megabytes=32, repeats=2)
    assert 1e8 < speed < 1e13
    assert "threads" in source
    assert peak_memory() > 50e6


@pytest.mark.parametrize("rows", [1, 64])
def test_a_prefill_chunk_reads_weights_once(rows: int) -> None:
    params = random_params(TINY)
    one = step_cost(TINY, params, [100.0], rows=1)
    cost = step_cost(TINY, params, [100.0], rows=rows)
    assert cost.weights - one.weights == (rows - 1) * 64 * 4
    assert cost.kv_write == rows * one.kv_write
