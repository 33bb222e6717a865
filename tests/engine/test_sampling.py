"""Sampling against NumPy: filters, greedy limits, seeds, and values refused at the door."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.engine.sampling import SamplingParams, filter_logits, pack_sampling, sample
from stoker.models.errors import StokerError

SAMPLE = jax.jit(sample)
FILTER = jax.jit(filter_logits)


def draw(logits: list[float], params: SamplingParams, positions: range) -> collections.Counter:
    rows = len(positions)
    sampling = pack_sampling([params] * rows)
    many = np.tile(np.array(logits, np.float32), (rows, 1))
    tokens = SAMPLE(many, sampling, np.array(positions, np.int32))
    return collections.Counter(np.asarray(tokens).tolist())


def numpy_filter(scaled: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Kept mask of one row: sorting and cumulative sums in float64, ties kept."""
    order = np.argsort(-scaled, kind="stable")
    kept = np.ones(len(scaled), bool)
    if 0 < params.top_k < len(scaled):
        kept &= scaled >= scaled[order[params.top_k - 1]]
    weights = np.where(kept, np.exp(scaled.astype(np.float64)), 0)
    if params.top_p < 1:
        below = np.cumsum(weights[order]) - weights[order]
        last = order[np.flatnonzero(below < params.top_p * weights.sum())[-1:]]
        kept &= scaled >= (scaled[last[0]] if len(last) else scaled.max())
    kept &= scaled >= np.log(max(params.min_p, 1e-300))
    return kept | (scaled == scaled.max())


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    top_k=st.sampled_from([-1, 0, 1, 2, 7, 64, 10**9]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0]),
    spread=st.sampled_from([0.01, 1.0, 30.0]),
)
def test_filters_keep_what_sorting_keeps(
    seed: int, top_k: int, top_p: float, min_p: float, spread: float
) -> None:
    logits = np.random.default_rng(seed).normal(0, spread, 64).astype(np.float32)
    scaled = logits - logits.max()
    params = SamplingParams(temperature=1, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = np.isfinite(FILTER(scaled[None], pack_sampling([params]))[0])
    expected = numpy_filter(scaled, params)
    # A sum that meets top_p to within rounding may fall on either side.
    assert (kept != expected).sum() <= (1 if 0 < top_p < 1 else 0)
    assert kept[scaled.argmax()]


def test_ties_are_kept_together() -> None:
    params = SamplingParams(temperature=1, top_k=2, seed=0)
    assert set(draw([1.0, 1.0, 1.0, -5.0], params, range(300))) == {0, 1, 2}


def test_temperature_comes_before_top_p() -> None:
    """Logits 3, 2, 1 at temperature 0.5 give 0.8668, 0.1173, 0.0159: top_p 0.8 keeps the first."""
    params = SamplingParams(temperature=0.5, top_p=0.8, seed=3)
    assert set(draw([3, 2, 1], params, range(500))) == {0}
    assert set(draw([3, 2, 1], SamplingParams(temperature=1, top_p=0.8), range(500))) == {0, 1}


@pytest.mark.parametrize("off", [{"top_p": 0.0}, {"min_p": 1.0}, {"top_k": 1}])
def test_narrowest_filters_take_the_best(off: dict) -> None:
    assert set(draw([0.0, 2.0, 1.9], SamplingParams(temperature=5, **off), range(200))) == {1}


@pytest.mark.parametrize("temperature", [0, 1e-12, 1e-6, 1e-4])
def test_tiny_temperatures_take_the_best(temperature: float) -> None:
    logits = np.random.default_rng(0).normal(0, 3, 500)
    drawn = draw(logits.tolist(), SamplingParams(temperature=temperature), range(20))
    assert set(drawn) == {int(logits.argmax())}


def test_draws_follow_the_distribution() -> None:
    logits, n = [2.0, 1.0, 0.0, -1.0], 20000
    drawn = draw(logits, SamplingParams(temperature=2.0, seed=9), range(n))
    expected = np.exp(np.array(logits) / 2)
    expected /= expected.sum()
    for token, share in enumerate(expected):
        # Five standard deviations of a binomial share.
        assert abs(drawn[token] / n - share) < 5 * np.sqrt(share * (1 - share) / n)


def test_draw_depends_on_seed_and_position_only() -> None:
    logits = np.random.default_rng(1).normal(0, 1, (1, 100)).astype(np.float32)
    hot = SamplingParams(temperature=3, seed=2**40 + 1)
    alone = SAMPLE(logits, pack_sampling([hot]), np.array([17], np.int32))[0]
    others = [SamplingParams(), SamplingParams(temperature=1, top_k=3, seed=4), hot, hot]
    rows = np.concatenate([logits * 0.3, logits * 2, logits, logits])
    together = SAMPLE(rows, pack_sampling(others), np.array([17, 17, 17, 18], np.int32))
    assert together[2] == alone
    by_seed = {
        int(SAMPLE(logits, pack_sampling([SamplingParams(3, seed=s)]), np.array([17]))[0])
        for s in (0, 1, 2, 2**32, 2**33, 2**62)
    }
    assert len(by_seed) > 3


def test_no_seed_means_a_fresh_one() -> None:
    keys = {tuple(pack_sampling([SamplingParams(1.0)]).key[0].tolist()) for _ in range(20)}
    assert len(keys) == 20


@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.int64])
def test_numpy_integers_are_integers(kind: type) -> None:
    params = SamplingParams(1.0, top_k=kind(3), seed=kind(5), max_tokens=kind(9))
    assert params == SamplingParams(1.0, top_k=3, seed=5, max_tokens=9)
    assert pack_sampling([params]).key.tolist() == [[0, 5]]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 1e9),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("min_p", 2),
        ("min_p", float("inf")),
        ("top_k", -5),
        ("top_k", 1.5),
        ("seed", -1),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("stop", [""]),
        ("stop", [3]),
    ],
)
def test_bad_values_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(StokerError, match=f"^{name} "):
        SamplingParams(**{name: value})


def test_one_structure_for_all_requests() -> None:
    """Options never change the tree or its types, so they never recompile."""
    plain = pack_sampling([SamplingParams()])
    full = pack_sampling([SamplingParams(0.5, 10**9, 0.5, 0.5, 7, 9, ("x",), True)])
    assert jax.tree.map(jnp.shape, plain) == jax.tree.map(jnp.shape, full)
    assert jax.tree.map(jnp.result_type, plain) == jax.tree.map(jnp.result_type, full)
