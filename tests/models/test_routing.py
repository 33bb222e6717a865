"""The choice of experts against a loop over rows in NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from stoker.models.errors import StokerError
from stoker.models.parts import Router
from stoker.models.routing import choose_experts

RULES = {
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


@pytest.mark.parametrize("name", RULES)
def test_experts_and_weights_equal_a_loop(name: str) -> None:
    router, normalise = RULES[name]
    rng = np.random.default_rng(1)
    logits, bias = rng.normal(size=(50, 12)), rng.normal(0, 0.3, 12)
    biased = jnp.float32(bias) if router.choice_bias else None
    weights, chosen = choose_experts(jnp.float32(logits), biased, 4, normalise, router)
    got = np.zeros_like(logits)
    np.put_along_axis(got, np.asarray(chosen), np.asarray(weights), axis=1)
    np.testing.assert_allclose(got, expected(logits, bias, 4, normalise, router), atol=1e-5)


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
