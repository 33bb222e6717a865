"""Byte and operation counts against counting by hand."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from tiny import DEEPSEEK, TINY, random_params

from stoker.engine.accounting import (
    CacheReads,
    experts_touched,
    memory_bandwidth,
    peak_memory,
    step_cost,
)
from stoker.engine.cache import new_cache, token_bytes
from stoker.models.config import LayerKind
from stoker.models.parameters import abstract_params, count_elements, init_params
from stoker.models.random_weights import architecture

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


def test_experts_that_no_row_goes_to_are_not_read() -> None:
    """By hand: two layers of four experts, of which a row takes two."""
    config = dataclasses.replace(TINY, n_experts=4, experts_per_token=2)
    params, expert = random_params(config), 3 * 64 * 160
    rest = 4 * (2 * (2 * 64 * 64 + 2 * 64 * 16 + 4 * 64) + NORMS + 512 * 64)
    for rows, touched in ((1, 2.0), (2, 3.0), (3, 3.5)):
        assert experts_touched(4, 2, rows) == touched
        cost = step_cost(config, params, [10.0] * rows)
        assert cost.weights == rest + rows * 64 * 4 + 4 * 2 * touched * expert
    one = step_cost(config, params, [10.0])
    active = rest / 4 + 2 * 2 * expert
    assert one.operations == 2 * active + 4 * 2 * 8 * 8 * 10


def test_windows_bound_what_is_read_and_computed() -> None:
    """By hand: of two layers, one sees 16 tokens; a cached token takes 128 bytes in each."""
    config = dataclasses.replace(TINY, kinds=(LayerKind(16), LayerKind()))
    params = random_params(TINY)
    whole, cost = (step_cost(c, params, [100.0, 7.0]) for c in (TINY, config))
    assert cost.kv_read == 128 * (16 + 100 + 7 + 7)
    assert cost.kv_write == whole.kv_write
    assert whole.operations - cost.operations == 4 * 8 * 8 * 84
    # A chunk of ten rows: its first sees six tokens more than its last but nine.
    assert CacheReads(config).tokens(100, 10) == 16 + 9 + 100
    assert CacheReads(config).tokens(20, 10) == 20 + 20


def test_latent_attention_by_hand() -> None:
    """A latent vector of 32 + 8 numbers in each of two layers; eight heads meet it."""
    params = jax.eval_shape(lambda key: init_params(DEEPSEEK, key), jax.random.key(0))
    one, cost = (step_cost(DEEPSEEK, params, [context]) for context in (1.0, 101.0))
    assert cost.kv_read == 101 * 2 * 40 * 4
    assert cost.kv_write == 2 * 40 * 4
    assert cost.operations - one.operations == 100 * 2 * 2 * 8 * (40 + 32)


def test_published_sizes_cost_nothing_to_describe() -> None:
    """DeepSeek-V3: 671 B parameters, of which a token meets 37 B; V2-Lite: 15.7 B and 2.4 B.

    Source: the makers' model cards, which count neither V3's layer for further tokens nor, among
    those that a token meets, embedding tables.
    """
    for name, total, active in (("deepseek-v3", 671.0, 37.0), ("deepseek-v2-lite", 15.7, 2.4)):
        config = architecture(name)
        shapes = jax.eval_shape(lambda key, c=config: init_params(c, key), jax.random.key(0))
        assert count_elements(shapes) == count_elements(abstract_params(config))
        assert count_elements(shapes) / 1e9 == pytest.approx(total, rel=0.002)
        operations = step_cost(config, shapes, [1.0]).operations
        assert operations / 2e9 == pytest.approx(active, rel=0.03)


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
