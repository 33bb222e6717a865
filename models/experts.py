"""A mixture of experts in place of a layer's MLP (Shazeer et al. 2017), on a flat token axis."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..sharding.collectives import part, total
from . import ops
from .config import ModelConfig
from .parameters import Params


def experts_block(weights: Params, x: jax.Array, config: ModelConfig) -> jax.Array:
    """Norm, then the chosen experts' gated MLPs of `x [T, D]`, summed by the router's weights.

    Rows are sorted by expert, so that each expert's are neighbours and its weights are read once.
    """
    kernels = config.kernels
    if config.pre_norm:
        x = ops.rms_norm(x, weights["mlp_norm"], config.norm_eps, kernels)
    scores = ops.products(x, (weights["router"],), kernels, dtype=jnp.dtype("float32"))[0]
    scores = scores + weights.get("router_bias", 0.0)
    rule = (config.experts_per_token, config.expert_norm, config.router)
    shares, chosen = ops.route(scores, weights.get("choice_bias"), *rule, kernels)
    held, width, _ = config.split.resolve(("experts", "ff", None))
    n_held = weights["expert_gate"].shape[0]
    rows, places, sizes = ops.deal(chosen, part(held) * n_held, n_held, kernels)
    matrices = (weights["expert_gate"], weights["expert_up"])
    biases = weights.get("expert_gate_bias"), weights.get("expert_up_bias")
    gate, up = ops.grouped_products(x, matrices, sizes, kernels, biases, rows)
    down, bias = weights["expert_down"], weights.get("expert_down_bias")
    if bias is not None and width:
        bias = jnp.where(part(width) == 0, bias, 0)  # once in the sum over parts
    out = ops.grouped_gated_matmul(gate, up, down, sizes, kernels, config.activation, bias)
    if held:
        out = jnp.where(jnp.arange(out.shape[0])[:, None] < sizes.sum(), out, 0)
    mixed = ops.combine(out, places, shares, kernels)
    if config.shared_d_ff:
        # Its columns are split over the same devices: one sum serves both.
        mixed = mixed + _shared_mlp(weights, x, config)
    mixed = total(mixed, (*held, *width))
    if config.post_norm:
        mixed = ops.rms_norm(mixed, weights["mlp_post_norm"], config.norm_eps, kernels)
    return mixed


def _shared_mlp(weights: Params, x: jax.Array, config: ModelConfig) -> jax.Array:
    """The gated MLP that every row of the normed `x [T, D]` goes through."""
    matrices = (weights["shared_gate"], weights["shared_up"])
    gate, up = ops.products(x, matrices, config.kernels)
    return ops.gated_matmul(gate, up, weights["shared_down"], config.kernels, config.activation)
