"""The one decoder, over a flat token axis. Only attention knows about sequences."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from . import ops
from .config import ModelConfig
from .parameters import Params

#: Key pages `[P, K, H, Z]` and value pages `[P, K, Z, H]` of one layer.
LayerCache = tuple[jax.Array, jax.Array]


def decoder(
    params: Params,
    cache: tuple[LayerCache, ...],
    tokens: jax.Array,
    layout: ops.Layout,
    config: ModelConfig,
) -> tuple[tuple[LayerCache, ...], jax.Array]:
    """Runs all layers over one step's rows.

    Args:
      params: the tree that `abstract_params(config)` describes.
      cache: key and value pages of each of the L layers; updated in place where donated.
      tokens: int32 `[T]`.
      layout: which slot and position each row has.
      config: the architecture (static).

    Returns:
      The cache, and the last layer's output `[T, D]` before the final norm.
    """
    x = ops.embed(params["embedding"], tokens, config.compute_dtype)
    _, positions = layout.rows(tokens.shape[0])
    turn = ops.rotary_tables(positions, config.rope)
    new_cache = []
    for weights, pages in zip(params["layers"], cache, strict=True):
        x, pages = layer(weights, pages, x, turn, layout, config=config)
        new_cache.append(pages)
    return tuple(new_cache), x


# Its own jit: layers of equal shapes are traced once, whatever their number.
@functools.partial(jax.jit, static_argnames="config")
def layer(
    weights: Params,
    pages: LayerCache,
    x: jax.Array,
    turn: tuple[jax.Array, jax.Array],
    layout: ops.Layout,
    *,
    config: ModelConfig,
) -> tuple[jax.Array, LayerCache]:
    """One decoder layer on `x [T, D]`: attention, then the gated MLP, each with its residual."""
    mixed, pages = attention_block(weights, pages, x, turn, layout, config)
    x = x + mixed
    return x + mlp_block(weights, x, config), pages


def attention_block(
    weights: Params,
    pages: LayerCache,
    x: jax.Array,
    turn: tuple[jax.Array, jax.Array],
    layout: ops.Layout,
    config: ModelConfig,
) -> tuple[jax.Array, LayerCache]:
    """Norm, projections, rotary embedding, attention over the pages and output projection."""
    norm = (weights["attn_norm"], config.norm_eps)
    matrices = [weights[name] for name in "qkv"]
    projections = ops.products(x, matrices, config.kernels, norm=norm)
    if config.attention_bias:
        biases = (weights[f"{name}_bias"] for name in "qkv")
        projections = tuple(
            projected + bias.astype(projected.dtype)
            for projected, bias in zip(projections, biases, strict=True)
        )
    q, k, v = (projected.reshape(x.shape[0], -1, config.head_dim) for projected in projections)
    out, keys, values = ops.attention(
        q,
        k,
        v,
        *pages,
        layout,
        config.kernels,
        turn=turn,
        scale=config.head_dim**-0.5,
    )
    return ops.matmul(out.reshape(x.shape[0], -1), weights["o"], config.kernels), (keys, values)


def mlp_block(weights: Params, x: jax.Array, config: ModelConfig) -> jax.Array:
    """Norm, then down(activation(gate) * up)."""
    norm = (weights["mlp_norm"], config.norm_eps)
    matrices = (weights["gate"], weights["up"])
    gate, up = ops.products(x, matrices, config.kernels, norm=norm)
    return ops.gated_matmul(gate, up, weights["down"], config.kernels, config.activation)


def head(params: Params, x: jax.Array, config: ModelConfig) -> jax.Array:
    """Logits float32 `[T, V]` of the decoder's output `x [T, D]`: final norm, then the head."""
    weight = params["embedding"] if config.tied_head else params["head"]
    norm = (params["final_norm"], config.norm_eps)
    return ops.products(x, (weight,), config.kernels, norm=norm, dtype=jnp.dtype("float32"))[0]
