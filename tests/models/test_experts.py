"""The parts of a mixture of experts against NumPy."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import KERNELS, TINY

from stoker.models.config import ModelConfig
from stoker.models.errors import StokerError
from stoker.models.experts import experts_block
from stoker.models.ops import route
from stoker.models.ops.xla import grouped_matmul
from stoker.models.parts import PLAIN_ROUTER
from stoker.models.quantized import QuantArray, dequantize
from stoker.models.random_weights import random_weights

EXPERTS = dataclasses.replace(TINY, n_experts=4, experts_per_token=2)


@pytest.mark.parametrize("sizes", [[3, 0, 4], [0, 0, 7], [7, 0, 0], [2, 3, 2]])
def test_each_row_meets_the_matrix_of_its_group(sizes):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(7, 16)).astype(np.float32)
    weight = rng.normal(size=(3, 5, 16)).astype(np.float32)
    group = np.repeat(np.arange(3), sizes)
    want = np.einsum("tc,trc->tr", x, weight[group])
    got = grouped_matmul(jnp.asarray(x), jnp.asarray(weight), jnp.asarray(sizes, jnp.int32))
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_quantised_matrices_are_what_they_stand_for():
    rng = np.random.default_rng(1)
    codes = jnp.asarray(rng.integers(-128, 128, (2, 5, 32), np.int8))
    scale = jnp.asarray(rng.uniform(0.01, 0.1, (2, 5, 1)).astype(np.float16))
    weight = QuantArray(codes, scale)
    x = jnp.asarray(rng.normal(size=(4, 32)).astype(np.float32))
    sizes = jnp.array([1, 3], jnp.int32)
    want = grouped_matmul(x, dequantize(weight), sizes)
    np.testing.assert_allclose(grouped_matmul(x, weight, sizes), want, atol=1e-4)


@pytest.mark.parametrize("kernels", KERNELS)
def test_shares_are_of_the_likeliest_experts(kernels):
    scores = jnp.log(jnp.array([[0.1, 0.4, 0.2, 0.3], [0.7, 0.1, 0.15, 0.05]]))
    rule = PLAIN_ROUTER, KERNELS[kernels]
    shares, chosen = route(scores, None, 2, False, *rule)
    np.testing.assert_array_equal(chosen, [[1, 3], [0, 2]])
    np.testing.assert_allclose(shares, [[0.4, 0.3], [0.7, 0.15]], rtol=1e-5)
    shares, _ = route(scores, None, 2, True, *rule)
    np.testing.assert_allclose(shares.sum(axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("weights", ["float32", "int8", "int4", "mxfp4"])
def test_a_row_that_is_not_a_number_keeps_to_itself(weights, kernels):
    config = dataclasses.replace(EXPERTS, kernels=KERNELS[kernels])
    params = random_weights(config, weights)["layers"][0]
    x = jax.random.normal(jax.random.key(0), (6, EXPERTS.d_model))
    clean = experts_block(params, x, config)
    spoilt = experts_block(params, x.at[2].set(jnp.nan), config)
    kept = np.arange(6) != 2
    assert np.isfinite(clean).all() and np.isnan(spoilt[2]).all()
    np.testing.assert_allclose(spoilt[kept], clean[kept], atol=1e-5)


@pytest.mark.parametrize("wanted", [0, 5])
def test_a_number_of_experts_that_cannot_serve_is_refused(wanted):
    with pytest.raises(StokerError, match=rf"{wanted} experts for each token of 4"):
        ModelConfig(**{**vars(EXPERTS), "experts_per_token": wanted})
