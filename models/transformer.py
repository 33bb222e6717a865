"""The one decoder, over a flat token axis. Only attention knows about sequences."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from . import ops
from .config import LayerKind, ModelConfig
from .experts import experts_block
from .latent import latent_block
from .parameters import Params

#: The pages of one layer, as `pages.layer_pages` describes them: keys and values, or latent ones.
LayerCache = tuple[jax.Array, ...]


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
      cache: the pages of each of the L layers; updated in place where donated.
      tokens: int32 `[T]`.
      layout: which slot and position each row has.
      config: the architecture (static).

    Returns:
      The cache, and the last layer's output `[T, D]` before the final norm.
    """
    x = ops.embed(params["embedding"], tokens, config.compute_dtype) * config.embedding_scale
    _, positions = layout.rows(tokens.shape[0])
    turns = {name: ops.rotary_tables(positions, rope) for name, rope in config.ropes.items()}
    turns["none"] = (jnp.zeros((tokens.shape[0], 0), jnp.float32),) * 2
    new_cache = []
    for weights, pages, kind in zip(params["layers"], cache, config.layer_kinds, strict=True):
        x, pages = layer(weights, pages, x, turns[kind.rope], layout, config=config, kind=kind)
        new_cache.append(pages)
    return tuple(new_cache), x


# Its own jit: layers of equal shapes and kind are traced once, whatever their number.
@functools.partial(jax.jit, static_argnames=("config", "kind"))
def layer(
    weights: Params,
    pages: LayerCache,
    x: jax.Array,
    turn: tuple[jax.Array, jax.Array],
    layout: ops.Layout,
    *,
    config: ModelConfig,
    kind: LayerKind,
) -> tuple[jax.Array, LayerCache]:
    """One decoder layer on `x [T, D]`: attention, then MLP or experts, each with its residual."""
    if config.latent is not None:
        mixed, *pages = latent_block(weights, *pages, x, turn, layout, config, config.latent)
    else:
        mixed, pages = attention_block(weights, pages, x, turn, layout, config, kind)
    x = x + mixed * config.residual_scale
    mlp = experts_block if "router" in weights else mlp_block
    return x + mlp(weights, x, config) * config.residual_scale, tuple(pages)


def attention_block(
    weights: Params,
    pages: LayerCache,
    x: jax.Array,
    turn: tuple[jax.Array, jax.Array],
    layout: ops.Layout,
    config: ModelConfig,
    kind: LayerKind,
) -> tuple[jax.Array, LayerCache]:
    """Projections, rotary embedding, attention over the pages and output projection, with norms."""
    norm = (weights["attn_norm"], config.norm_eps) if config.pre_norm else None
    matrices = [weights[name] for name in "qkv"]
    q, k, v = ops.products(x, matrices, config.kernels, norm=norm)
    q, k, v = (_biased(weights, name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    if config.qk_norm == "full":
        q, k = _qk_norms(weights, q, k, config)
    q, k, v = (part.reshape(x.shape[0], -1, config.head_dim) for part in (q, k, v))
    if config.qk_norm == "head":
        q, k = _qk_norms(weights, q, k, config)
    out, *new_pages = ops.attention(
        q,
        k,
        v,
        *pages,
        layout,
        config.kernels,
        turn=turn,
        scale=config.score_scale,
        sinks=weights.get("sinks"),
        window=kind.window,
        softcap=config.attention_softcap,
    )
    out = ops.matmul(out.reshape(x.shape[0], -1), weights["o"], config.kernels)
    out = _biased(weights, "o", out)
    if config.post_norm:
        out = ops.rms_norm(out, weights["attn_post_norm"], config.norm_eps)
    return out, tuple(new_pages)


def mlp_block(weights: Params, x: jax.Array, config: ModelConfig) -> jax.Array:
    """down(activation(gate) * up), with norms."""
    norm = (weights["mlp_norm"], config.norm_eps) if config.pre_norm else None
    matrices = (weights["gate"], weights["up"])
    gate, up = ops.products(x, matrices, config.kernels, norm=norm)
    gate, up = _biased(weights, "gate", gate), _biased(weights, "up", up)
    out = ops.gated_matmul(gate, up, weights["down"], config.kernels, config.activation)
    out = _biased(weights, "down", out)
    if config.post_norm:
        out = ops.rms_norm(out, weights["mlp_post_norm"], config.norm_eps)
    return out


def _biased(weights: Params, name: str, projected: jax.Array) -> jax.Array:
    """`projected [T, R]` plus the bias of the projection `name`, where it has one."""
    bias = weights.get(f"{name}_bias")
    return projected if bias is None else projected + bias.astype(projected.dtype)


def _qk_norms(
    weights: Params, q: jax.Array, k: jax.Array, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """Queries and keys, each through its RMS norm over the last axis."""
    q = ops.rms_norm(q, weights["q_norm"], config.norm_eps)
    return q, ops.rms_norm(k, weights["k_norm"], config.norm_eps)


def head(params: Params, x: jax.Array, config: ModelConfig) -> jax.Array:
    """Logits float32 `[T, V]` of the decoder's output `x [T, D]`: final norm, head, scale, cap."""
    weight = params["embedding"] if config.tied_head else params["head"]
    norm = (params["final_norm"], config.norm_eps)
    dtype = jnp.dtype("float32")
    logits = ops.products(x, (weight,), config.kernels, norm=norm, dtype=dtype)[0]
    return ops.softcap(logits * config.logit_scale, config.logit_softcap)
