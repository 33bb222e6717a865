"""QNT-03: int8 keys and values, scaled by token and head, change little at any length."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from driving import chunk, jitted, page_table
from tiny import TINY, random_params

from stoker.engine import steps
from stoker.engine.cache import new_cache
from stoker.engine.pages import pages_for
from stoker.models.config import Kernels

TOKENS = 300


def log_probabilities(params, kv_dtype: str, kernels: Kernels) -> np.ndarray:
    """After each token of a forced sequence, `[TOKENS, V]`."""
    config = dataclasses.replace(TINY, kv_dtype=kv_dtype, kernels=kernels)
    pages = pages_for(TOKENS)
    cache, table = new_cache(config, pages), page_table(1, pages)
    run = jitted(steps.prefill_logits, config)
    found = []
    for place, token in enumerate(np.random.default_rng(5).integers(0, 512, TOKENS).tolist()):
        cache, logits = run(params, cache, chunk([[token]], [place], table))
        found.append(logits[0])
    return np.asarray(jax.nn.log_softmax(np.stack(jax.device_get(found)), axis=-1))


@pytest.mark.parametrize("platform", ["xla", "cpu"])
def test_divergence_is_small_and_does_not_grow(platform: str) -> None:
    params, kernels = random_params(TINY), Kernels(platform)
    exact, rounded = (log_probabilities(params, kind, kernels) for kind in ("float32", "int8"))
    # The logits of this model spread as those of large ones do, so near ties are few.
    assert exact.std() > 2
    divergence = np.sum(np.exp(exact) * (exact - rounded), axis=-1)
    assert 0 < divergence.mean() < 0.01
    assert np.mean(exact.argmax(axis=-1) == rounded.argmax(axis=-1)) > 0.94
    assert divergence[-50:].mean() < 3 * divergence[:50].mean()
