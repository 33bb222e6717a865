"""Logits of a row on the CPU kernels depend on no other row, whatever the model is made of."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from driving import chunk, page_table
from tiny import DEEPSEEK, TINY

from stoker.engine import steps
from stoker.engine.cache import new_cache
from stoker.models.config import ACTIVATION_TYPES, Kernels, LayerKind, ModelConfig
from stoker.models.parts import Latent, Router
from stoker.models.random_weights import random_weights

LENGTH = 33
#: Wide enough that sums of a row are worth splitting over lanes, and of odd parts.
WIDE = dataclasses.replace(TINY, d_model=224, d_ff=96, n_heads=4, head_dim=16)
WIDE = dataclasses.replace(WIDE, rope=dataclasses.replace(TINY.rope, dims=16))
EXPERTS = dataclasses.replace(WIDE, n_experts=24, experts_per_token=3)
LATENT = dataclasses.replace(
    DEEPSEEK,
    d_model=224,
    head_dim=40,
    latent=Latent(kv_rank=64, rope_dim=8, nope_dim=32, v_dim=32, q_rank=32),
    n_experts=24,
    experts_per_token=3,
    router=Router("sigmoid", True, groups=4, used_groups=2, group_top=2, scale=1.5),
)
MODELS = {
    "mixtral": EXPERTS,
    "qwen3_moe": dataclasses.replace(EXPERTS, qk_norm="head", expert_norm=False),
    "gpt_oss": dataclasses.replace(
        EXPERTS,
        kinds=(LayerKind(window=9), LayerKind()),
        attention_bias=True,
        output_bias=True,
        attention_sinks=True,
        mlp_bias=True,
        router_bias=True,
        activation="clamped_swiglu",
    ),
    "deepseek_v2": dataclasses.replace(
        LATENT, router=Router(groups=4, used_groups=2, scale=2.0), expert_norm=False
    ),
    "deepseek_v3": LATENT,
    "post_norm": dataclasses.replace(EXPERTS, pre_norm=False, post_norm=True, qk_norm="full"),
    "scales": dataclasses.replace(
        WIDE,
        embedding_scale=6.1,
        residual_scale=0.37,
        logit_scale=0.3,
        attention_softcap=5.0,
        logit_softcap=3.0,
        attention_bias=True,
        mlp_bias=True,
        vocab_size=509,
    ),
    "gemma3": dataclasses.replace(WIDE, post_norm=True, qk_norm="head", activation="gelu_tanh"),
}


def shaken(config: ModelConfig, weights: str):
    """Random weights whose norms, biases and sinks are random too."""
    rng = np.random.default_rng(4)

    def shake(leaf: jax.Array) -> jax.Array:
        if leaf.ndim > 1 and leaf.dtype != np.float32:
            return leaf
        return leaf + rng.normal(0, 0.3, leaf.shape).astype(leaf.dtype)

    return jax.tree.map(shake, random_weights(config, weights))


@functools.lru_cache
def jitted(config: ModelConfig):
    @jax.jit
    def run(params, cache, batch):
        cache, x = steps.decoder(params, cache, batch.tokens, steps.prefill_layout(batch), config)
        return cache, steps.head(params, x, config)

    return run


def logits(config: ModelConfig, params, ids: list[int], sizes: list[int]) -> np.ndarray:
    """Logits `[T, V]` after each of `ids`, run in chunks of the given sizes."""
    cache, table = new_cache(config, 4), page_table(1, 4)
    found, start = [], 0
    for size in sizes:
        batch = chunk([ids[start : start + size]], [start], table)
        cache, rows = jitted(config)(params, cache, batch)
        found.append(np.asarray(rows))
        start += size
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("name", "weights", "activations"),
    [
        *((name, "int4", activations) for name in MODELS for activations in ACTIVATION_TYPES),
        ("mixtral", "bfloat16", "float32"),
    ],
)
def test_chunks_change_no_bit(name: str, weights: str, activations: str) -> None:
    """In one step, in steps of eight and one, and one token after the other."""
    dtype = "bfloat16" if weights == "bfloat16" else "float32"
    config = dataclasses.replace(MODELS[name], kernels=Kernels("cpu", activations), dtype=dtype)
    params = shaken(config, weights)
    ids = np.random.default_rng(7).integers(0, config.vocab_size, LENGTH).tolist()
    whole = logits(config, params, ids, [LENGTH])
    assert np.isfinite(whole).all() and whole.std() > 1e-3
    np.testing.assert_array_equal(logits(config, params, ids, [8] * 4 + [1]), whole)
    np.testing.assert_array_equal(logits(config, params, ids, [1] * LENGTH), whole)
