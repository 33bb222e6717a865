"""The choice of experts, the order of rows and their sums, against loops in NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import KERNELS

from stoker.models.errors import StokerError
from stoker.models.ops import combine, deal, route
from stoker.models.parts import PLAIN_ROUTER, Router

RULES = {
    "plain": (PLAIN_ROUTER, True),
    "softmax": (Router(scale=2.0), False),
    "best of groups": (Router(groups=4, used_groups=2, scale=16.0), False),
    "v3": (Router("sigmoid", True, 4, 2, 2, 2.5), True),
    "v3, weights as they are": (Router("sigmoid", True, 4, 3, 2, 1.0), False),
}


def expected(logits: np.ndarray, bias: np.ndarray, n: int, normalise: bool, router: Router):
    """Weights `[T, E]`, zero for experts that are not chosen, one row at a time."""
    result = np.zeros_like(logits)
    each = logits.shape[1] // router.groups
    for row, values in zip(result, logits, strict=True):
        scores = 1 / (1 + np.exp(-values))
        if router.scores == "softmax":
            scores = np.exp(values) / np.exp(values).sum()
        ranked = scores + bias if router.choice_bias else scores.copy()
        good = []
        for g in range(router.groups):
            members = sorted(ranked[g * each : (g + 1) * each])[::-1]
            good.append(sum(members[: router.group_top]))
        groups = np.argsort(good)[::-1][: router.used_groups]
        allowed = [e for e in range(len(values)) if e // each in groups]
        chosen = sorted(allowed, key=lambda e: -ranked[e])[:n]
        total = scores[chosen].sum() if normalise else 1.0
        row[chosen] = scores[chosen] / total * router.scale
    return result


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", RULES)
def test_experts_and_weights_equal_a_loop(name: str, kernels: str) -> None:
    router, normalise = RULES[name]
    rng = np.random.default_rng(1)
    logits, bias = rng.normal(size=(50, 12)), rng.normal(0, 0.3, 12)
    biased = jnp.float32(bias) if router.choice_bias else None
    rule = 4, normalise, router, KERNELS[kernels]
    weights, chosen = route(jnp.float32(logits), biased, *rule)
    got = np.zeros_like(logits)
    np.put_along_axis(got, np.asarray(chosen), np.asarray(weights), axis=1)
    np.testing.assert_allclose(got, expected(logits, bias, 4, normalise, router), atol=1e-5)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", RULES)
def test_of_equal_scores_the_first_are_chosen(name: str, kernels: str) -> None:
    router, normalise = RULES[name]
    bias = jnp.zeros(12) if router.choice_bias else None
    logits = jnp.zeros((1, 12)).at[0, 10:].set(2.0)
    weights, chosen = route(logits, bias, 4, normalise, router, KERNELS[kernels])
    np.testing.assert_array_equal(chosen, [[10, 11, 0, 1]])
    assert (np.diff(weights[0]) <= 0).all()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("first", "held"), [(0, 6), (2, 3), (5, 1), (6, 2)])
def test_pairs_are_sorted_by_expert_and_keep_their_order(
    first: int, held: int, kernels: str
) -> None:
    chosen = np.random.default_rng(3).integers(0, 6, (11, 2)).astype(np.int32)
    rows, places, sizes = deal(jnp.asarray(chosen), first, held, KERNELS[kernels])
    bins = [e - first if 0 <= e - first < held else held for e in chosen.ravel()]
    order = sorted(range(22), key=lambda pair: bins[pair])
    np.testing.assert_array_equal(rows, [pair // 2 for pair in order])
    np.testing.assert_array_equal(np.ravel(places)[order], np.arange(22))
    np.testing.assert_array_equal(sizes, [bins.count(e) for e in range(held)])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_summed_by_their_weights(dtype: str, kernels: str) -> None:
    rng = np.random.default_rng(5)
    x, places = rng.normal(size=(15, 37)), rng.permutation(15).reshape(5, 3).astype(np.int32)
    weights, x = rng.normal(size=(5, 3)).astype(np.float32), jnp.asarray(x).astype(dtype)
    got = combine(x, jnp.asarray(places), jnp.asarray(weights), KERNELS[kernels])
    want = np.einsum("tkd,tk->td", np.float64(x)[places], weights)
    assert got.dtype == dtype
    np.testing.assert_allclose(np.float64(got), want, atol=1e-5 if dtype == "float32" else 3e-2)


@pytest.mark.parametrize(
    ("router", "said"),
    [
        (Router("relu"), "router scores 'relu' are not known"),
        (Router(groups=5), "12 experts do not divide into 5 groups"),
        (Router(groups=4, used_groups=1), "cannot give the 4 experts"),
        (Router(groups=4, used_groups=5), "5 of 4 groups"),
        (Router(groups=4, used_groups=2, group_top=4), "cannot be scored by 4"),
    ],
)
def test_a_router_that_cannot_choose_is_refused(router: Router, said: str) -> None:
    with pytest.raises(StokerError, match=said):
        router.check(12, 4)
