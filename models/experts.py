"""A mixture of experts in place of a layer's MLP (Shazeer et al. 2017), on a flat token axis."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..sharding.collectives import part, total
from . import ops
from .config import ModelConfig
from .parameters import Params
from .parts import PLAIN_ROUTER
from .routing import choose_experts


def experts_block(weights: Params, x: jax.Array, config: ModelConfig) -> jax.Array:
    """Norm, then the chosen experts' gated MLPs of `x [T, D]`, summed by the router's weights.

    Rows are sorted by expert, so that each expert's are neighbours and its weights are read once.
    """
    if config.pre_norm:
        x = ops.rms_norm(x, weights["mlp_norm"], config.norm_eps)
    scores = ops.products(x, (weights["router"],), config.kernels, dtype=jnp.dtype("float32"))[0]
    scores = scores + weights.get("router_bias", 0.0)
    if config.router == PLAIN_ROUTER:
        shares, chosen = route(scores, config.experts_per_token, config.expert_norm)
    else:
        rule = (config.experts_per_token, config.expert_norm, config.router)
        shares, chosen = choose_experts(scores, weights.get("choice_bias"), *rule)
    # The experts of other devices count as one more, which comes last and multiplies nothing: every
    # row stays, however uneven the loads.
    held, width, _ = config.split.resolve(("experts", "ff", None))
    n_held = weights["expert_gate"].shape[0]
    flat = chosen.reshape(-1) - part(held) * n_held
    flat = jnp.where((flat < 0) | (flat >= n_held), n_held, flat)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=n_held).astype(jnp.int32)
    rows = x[order // config.experts_per_token]
    matrices = (weights["expert_gate"], weights["expert_up"])
    biases = weights.get("expert_gate_bias"), weights.get("expert_up_bias")
    gate, up = ops.grouped_products(rows, matrices, sizes, config.kernels, biases)
    down, bias = weights["expert_down"], weights.get("expert_down_bias")
    if bias is not None and width:
        bias = jnp.where(part(width) == 0, bias, 0)  # once in the sum over parts
    out = ops.grouped_gated_matmul(gate, up, down, sizes, config.kernels, config.activation, bias)
    if held:
        out = jnp.where(jnp.arange(out.shape[0])[:, None] < sizes.sum(), out, 0)
    out = out[jnp.argsort(order)].reshape(*shares.shape, -1)
    mixed = jnp.sum(out.astype(jnp.float32) * shares[..., None], axis=1).astype(x.dtype)
    if config.shared_d_ff:
        # Its columns are split over the same devices: one sum serves both.
        mixed = mixed + _shared_mlp(weights, x, config)
    mixed = total(mixed, (*held, *width))
    if config.post_norm:
        mixed = ops.rms_norm(mixed, weights["mlp_post_norm"], config.norm_eps)
    return mixed


def _shared_mlp(weights: Params, x: jax.Array, config: ModelConfig) -> jax.Array:
    """The gated MLP that every row of the normed `x [T, D]` goes through."""
    matrices = (weights["shared_gate"], weights["shared_up"])
    gate, up = ops.products(x, matrices, config.kernels)
    return ops.gated_matmul(gate, up, weights["shared_down"], config.kernels, config.activation)


def route(scores: jax.Array, n_chosen: int, normalise: bool) -> tuple[jax.Array, jax.Array]:
    """The experts of each row, by the softmax of the router's `scores [T, E]` in float32.

    Returns:
      Shares float32 `[T, n_chosen]`, which sum to one where they are normalised, and the experts'
      numbers int32 `[T, n_chosen]`.
    """
    shares, chosen = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), n_chosen)
    if normalise:
        shares = shares / shares.sum(axis=-1, keepdims=True)
    return shares, chosen
