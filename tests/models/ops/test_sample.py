"""The draw, by every implementation: against sorting in float64, Hugging Face, and exact shares."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled import drawn_with
from tiny import KERNELS

from stoker.models import ops

GRID = 1024


@pytest.fixture(scope="module", params=KERNELS)
def platform(request: pytest.FixtureRequest) -> str:
    return request.param


@functools.lru_cache
def sampler(platform: str):
    return jax.jit(functools.partial(ops.sample, kernels=KERNELS[platform]))


def sample(
    platform: str,
    logits: np.ndarray,
    temperature: float | np.ndarray = 1.0,
    top_k: int | np.ndarray = 0,
    top_p: float | np.ndarray = 1.0,
    min_p: float | np.ndarray = 0.0,
    uniform: float | np.ndarray = 0.5,
) -> tuple[np.ndarray, np.ndarray]:
    rows = len(logits)
    sampling = drawn_with(rows, logits.shape[1], temperature, top_k, top_p, min_p)
    tokens, total = sampler(platform)(
        np.asarray(logits, np.float32),
        sampling,
        np.zeros((rows, 1), np.int32),
        np.arange(rows, dtype=np.int32),
        np.zeros(rows, np.int32),
        np.broadcast_to(np.float32(uniform), (rows,)),
    )
    return np.asarray(tokens), np.asarray(total)


def draw_grid(platform: str, logits: np.ndarray, **options: float) -> np.ndarray:
    """The tokens that `GRID` evenly spaced numbers draw from one row, in their order."""
    uniform = (np.arange(GRID) + 0.5) / GRID
    rows = np.tile(logits, (64, 1))
    parts = uniform.reshape(-1, 64)
    return np.concatenate([sample(platform, rows, uniform=u, **options)[0] for u in parts])


def kept_probabilities(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    """What a row's tokens should be drawn with, by sorting in float64; ties are kept together."""
    scaled = (logits.astype(np.float64) - logits.max()) / np.float32(temperature)
    order = np.argsort(-scaled, kind="stable")
    kept = np.ones(len(scaled), bool)
    if 0 < top_k < len(scaled):
        kept &= scaled >= scaled[order[top_k - 1]]
    weights = np.where(kept, np.exp(scaled), 0)
    if top_p < 1:
        below = np.cumsum(weights[order]) - weights[order]
        last = order[np.flatnonzero(below < np.float32(top_p) * weights.sum())[-1:]]
        kept &= scaled >= (scaled[last[0]] if len(last) else 0)
    kept &= scaled >= np.log(max(min_p, 1e-300))
    weights = np.where(kept | (scaled == 0), np.exp(scaled), 0)
    return weights / weights.sum()


def check_shares(tokens: np.ndarray, expected: np.ndarray, slack: float) -> None:
    """Evenly spaced numbers draw ids in rising order, each as often as it is likely."""
    assert (np.diff(tokens) >= 0).all()
    shares = np.bincount(tokens, minlength=len(expected)) / len(tokens)
    assert np.abs(np.cumsum(shares) - np.cumsum(expected)).max() <= slack


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 2, 7, 64, 500, 10**9]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-6, 0.05, 0.5]),
    spread=st.sampled_from([0.01, 1.0, 30.0]),
    width=st.sampled_from([16, 509, 1300]),
)
def test_draws_follow_the_filtered_distribution(
    platform: str,
    seed: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    spread: float,
    width: int,
) -> None:
    logits = np.random.default_rng(seed).normal(0, spread, width).astype(np.float32)
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    expected = kept_probabilities(logits, **options)
    tokens = draw_grid(platform, logits, **options)
    # A sum that meets top_p to within rounding may fall on either side of one token.
    check_shares(tokens, expected, 1 / GRID + (expected.max() if 0 < top_p < 1 else 1e-5))
    outside = expected[np.unique(tokens)] == 0
    assert outside.sum() <= (1 if 0 < top_p < 1 else 0)


@pytest.mark.parametrize("options", [{}, {"top_k": 40}, {"top_p": 0.7}, {"min_p": 0.02}])
def test_a_whole_vocabulary(platform: str, options: dict) -> None:
    logits = np.random.default_rng(1).normal(0, 2, 49152).astype(np.float32)
    every = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **options}
    expected = kept_probabilities(logits, **every)
    check_shares(draw_grid(platform, logits, **every), expected, 1 / GRID + 2e-5)


@pytest.mark.parametrize("width", [1, 2, 16, 31, 33, 511, 512, 513, 49152])
def test_odd_widths_and_whole_rows(platform: str, width: int) -> None:
    """Greedy is argmax, the summary is logsumexp, and numbers at both ends stay in range."""
    logits = np.random.default_rng(width).normal(0, 4, (5, width)).astype(np.float32)
    wide = logits.astype(np.float64)
    tokens, total = sample(platform, logits, temperature=0)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    peak = wide.max(-1, keepdims=True)
    want = np.log(np.exp(wide - peak).sum(-1)) + peak[:, 0]
    np.testing.assert_allclose(total, want, atol=3e-6)
    first, _ = sample(platform, logits, uniform=0)
    assert (first == 0).all()
    last, _ = sample(platform, logits, temperature=100, uniform=1 - 2**-24)
    assert (last == width - 1).all()


def test_one_token_or_several_as_likely(platform: str) -> None:
    """Greedy takes the first of equals; filters keep equals together."""
    logits = np.array([0, 1, 1, -5, 1], np.float32)
    assert sample(platform, logits[None], temperature=0)[0].tolist() == [1]
    assert set(draw_grid(platform, logits, top_k=2).tolist()) == {1, 2, 4}
    assert set(draw_grid(platform, logits, top_p=0.01).tolist()) == {1, 2, 4}
    many = np.zeros(5000, np.float32)
    check_shares(draw_grid(platform, many, top_k=3, top_p=0.5), np.full(5000, 1 / 5000), 1e-3)


def test_temperature_comes_before_top_p(platform: str) -> None:
    """Logits 3, 2, 1 at temperature 0.5 give 0.8668, 0.1173, 0.0159: top_p 0.8 keeps the first."""
    logits = np.array([3, 2, 1], np.float32)
    assert set(draw_grid(platform, logits, temperature=0.5, top_p=0.8).tolist()) == {0}
    assert set(draw_grid(platform, logits, temperature=1, top_p=0.8).tolist()) == {0, 1}


def test_top_p_sees_what_top_k_kept(platform: str) -> None:
    """Of 0.4, 0.3, 0.2, 0.1, top_k 2 leaves 4/7 and 3/7: then top_p 0.5 keeps only the first."""
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    assert set(draw_grid(platform, logits, top_p=0.5).tolist()) == {0, 1}
    assert set(draw_grid(platform, logits, top_k=2, top_p=0.5).tolist()) == {0}


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-3])
def test_tiny_temperatures_take_the_best(platform: str, temperature: float) -> None:
    logits = np.random.default_rng(0).normal(0, 30, 500).astype(np.float32)
    for options in ({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
        drawn = draw_grid(platform, logits, temperature=temperature, **options)
        assert set(drawn.tolist()) == {int(logits.argmax())}


def test_masked_tokens_are_never_drawn(platform: str) -> None:
    logits = np.full(700, -np.inf, np.float32)
    logits[[3, 600]] = [1, 1]
    for options in ({}, {"top_k": 5}, {"top_p": 0.99}, {"min_p": 0.1}, {"temperature": 100.0}):
        assert set(draw_grid(platform, logits, **options).tolist()) == {3, 600}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", [0, 5, 699])
def test_rows_that_mean_nothing_say_so_and_stay_in_range(
    platform: str, bad: float, where: int
) -> None:
    logits = np.random.default_rng(2).normal(0, 1, (3, 700)).astype(np.float32)
    clean = logits.copy()
    logits[1, where] = bad
    clean[1] = logits[1] = np.where(np.arange(700) == where, bad, logits[1])
    for options in ({"temperature": 0}, {}, {"top_k": 5, "top_p": 0.9}, {"min_p": 0.5}):
        tokens, total = sample(platform, logits, **options)
        assert np.isfinite(total).tolist() == [True, False, True]
        assert ((tokens >= 0) & (tokens < 700)).all()
        alone = sample(platform, logits[[0, 2]], **options)[0]
        assert tokens[[0, 2]].tolist() == alone.tolist()
    tokens, total = sample(platform, np.full((1, 700), -np.inf, np.float32))
    assert 0 <= tokens[0] < 700 and not np.isfinite(total[0])


def mixed_rows(rows: int, width: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {
        "logits": rng.normal(0, 2.5, (rows, width)).astype(np.float32),
        "temperature": rng.choice([0, 0.5, 1, 1.5], rows),
        "top_k": rng.choice([0, 3, 50, 2000], rows),
        "top_p": rng.choice([0.3, 0.9, 1.0], rows),
        "min_p": rng.choice([0, 0.01], rows),
        "uniform": rng.random(rows, np.float32),
    }


@pytest.mark.parametrize("width", [509, 49152])
def test_a_row_is_chosen_alone_as_in_company(platform: str, width: int) -> None:
    """The same at batch sizes of 1, 8 and 32, whatever the other rows ask for."""
    rows = mixed_rows(32, width)
    tokens, total = sample(platform, **rows)
    for size in (1, 8):
        parts = [
            sample(platform, **{name: value[i : i + size] for name, value in rows.items()})
            for i in range(0, 32, size)
        ]
        np.testing.assert_array_equal(np.concatenate([part[0] for part in parts]), tokens)
        alone = np.concatenate([part[1] for part in parts])
        # XLA sums in an order of its own.
        np.testing.assert_allclose(alone, total, atol=0 if platform == "cpu" else 2e-6)


@pytest.mark.parametrize(("width", "count"), [(5, 20), (16, 20), (700, 20), (49152, 20), (700, 1)])
def test_largest_are_those_that_sorting_finds(platform: str, width: int, count: int) -> None:
    logits = np.random.default_rng(3).normal(0, 1, (4, width)).astype(np.float32)
    logits[1] = np.round(logits[1]) + 0.0  # ties, and no negative zero
    logits[2, 1] = -np.inf
    find = jax.jit(functools.partial(ops.largest, count=count, kernels=KERNELS[platform]))
    wanted = np.array([True, True, True, False])
    values, ids = map(np.asarray, find(logits, wanted))
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
    known = min(count, width)
    np.testing.assert_array_equal(ids[:3, :known], order[:3])
    np.testing.assert_array_equal(values[:3, :known], np.take_along_axis(logits, order, -1)[:3])
    assert (ids[:3, known:] == -1).all() and np.isneginf(values[:3, known:]).all()
    assert (ids[3] == -1).all() and np.isneginf(values[3]).all()
    values, _ = find(logits, wanted & False)
    assert np.isneginf(values).all()


@pytest.mark.reference
def test_filters_agree_with_hugging_face(platform: str) -> None:
    import torch
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
    from transformers.generation.logits_process import TemperatureLogitsWarper

    logits = np.random.default_rng(7).normal(0, 2, (6, 300)).astype(np.float32)
    for row, (temperature, top_k, top_p, min_p) in enumerate(
        [
            (0.7, 20, 1.0, 0.0),
            (1.5, 300, 0.8, 0.0),
            (1.0, 10**6, 1.0, 0.1),
            (0.5, 50, 0.9, 0.01),
            (2.0, 5, 0.5, 0.3),
            (1.0, 100, 0.99, 0.0),
        ]
    ):
        scores = torch.tensor(logits[row : row + 1])
        for warper in (
            TemperatureLogitsWarper(temperature),
            TopKLogitsWarper(top_k),
            TopPLogitsWarper(top_p),
            MinPLogitsWarper(min_p),
        ):
            scores = warper(None, scores)
        expected = torch.softmax(scores[0].double(), -1).numpy()
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        check_shares(draw_grid(platform, logits[row], **options), expected, 1 / GRID + 1e-5)
