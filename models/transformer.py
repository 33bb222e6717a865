"""The one decoder, over a flat token axis. Only attention knows about sequences."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from ..sharding.collectives import dealt, exchanged, joined, padded_rows, part, total
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
    T, context = tokens.shape[0], config.split.axes("context")
    parts = config.split.size(context)
    tokens = padded_rows(tokens, parts)
    _, positions = layout.rows(tokens.shape[0])
    turns = {name: ops.rotary_tables(positions, rope) for name, rope in config.ropes.items()}
    turns["none"] = (jnp.zeros((tokens.shape[0], 0), jnp.float32),) * 2
    # Devices that share a context also share the rows, except in attention.
    x = embed(params["embedding"], dealt(tokens, parts, context), config)
    new_cache = []
    for weights, pages, kind in zip(params["layers"], cache, config.layer_kinds, strict=True):
        x, pages = layer(weights, pages, x, turns[kind.rope], layout, config=config, kind=kind)
        new_cache.append(pages)
    return tuple(new_cache), joined(x, context)[:T]


def embed(table: ops.AnyWeight, tokens: jax.Array, config: ModelConfig) -> jax.Array:
    """Rows `tokens [T]` of the embedding table, scaled: `[T, D]`."""
    vocab, rows, dtype = config.split.axes("vocab"), table.shape[0], config.compute_dtype
    if not vocab:
        return ops.embed(table, tokens, dtype) * config.embedding_scale
    own = tokens - part(vocab) * rows
    mine = (own >= 0) & (own < rows)
    x = ops.embed(table, jnp.clip(own, 0, rows - 1), dtype)
    return total(jnp.where(mine[:, None], x, 0), vocab) * config.embedding_scale


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
        mixed, kept = latent_block(weights, pages[0], x, turn, layout, config, config.latent)
        pages = (kept,)
    else:
        mixed, pages = attention_block(weights, pages, x, turn, layout, config, kind)
    x = x + mixed * config.residual_scale
    mlp = experts_block if "router" in weights else mlp_block
    return x + mlp(weights, x, config) * config.residual_scale, pages


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
        q, k = _full_norms(weights, q, k, config)
    q, k, v = (rows.reshape(x.shape[0], -1, config.head_dim) for rows in (q, k, v))
    if config.qk_norm == "head":
        q, k = _qk_norms(weights, q, k, config)
    context = config.split.axes("context")
    attend = ops.attention
    if context:
        attend = functools.partial(ops.shared_attention, axes=context)
    k_pages, v_pages = ops.pack_pages(pages)
    out, keys, values = attend(
        q,
        k,
        v,
        k_pages,
        v_pages,
        layout,
        config.kernels,
        turn=turn,
        scale=config.score_scale,
        sinks=weights.get("sinks"),
        window=kind.window,
        softcap=config.attention_softcap,
    )
    out = ops.matmul(out.reshape(x.shape[0], -1), weights["o"], config.kernels)
    out = _biased(weights, "o", total(out, config.split.axes("heads")))
    if config.post_norm:
        out = ops.rms_norm(out, weights["attn_post_norm"], config.norm_eps, config.kernels)
    return out, tuple(jax.tree.leaves((keys, values)))


def mlp_block(weights: Params, x: jax.Array, config: ModelConfig) -> jax.Array:
    """down(activation(gate) * up), with norms."""
    norm = (weights["mlp_norm"], config.norm_eps) if config.pre_norm else None
    matrices = (weights["gate"], weights["up"])
    gate, up = ops.products(x, matrices, config.kernels, norm=norm)
    gate, up = _biased(weights, "gate", gate), _biased(weights, "up", up)
    out = ops.gated_matmul(gate, up, weights["down"], config.kernels, config.activation)
    out = _biased(weights, "down", total(out, config.split.axes("ff")))
    if config.post_norm:
        out = ops.rms_norm(out, weights["mlp_post_norm"], config.norm_eps, config.kernels)
    return out


def _biased(weights: Params, name: str, projected: jax.Array) -> jax.Array:
    """`projected [T, R]` plus the bias of the projection `name`, where it has one."""
    bias = weights.get(f"{name}_bias")
    return projected if bias is None else projected + bias.astype(projected.dtype)


def _qk_norms(
    weights: Params, q: jax.Array, k: jax.Array, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """Queries and keys, each through its RMS norm over the last axis."""
    q = ops.rms_norm(q, weights["q_norm"], config.norm_eps, config.kernels)
    return q, ops.rms_norm(k, weights["k_norm"], config.norm_eps, config.kernels)


def _full_norms(
    weights: Params, q: jax.Array, k: jax.Array, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """The same over all heads, of which each part has some; two numbers a row are summed."""
    axes = config.split.axes("heads")
    if not axes:
        return _qk_norms(weights, q, k, config)
    wide = [x.astype(jnp.float32) for x in (q, k)]
    squares = jnp.stack([(x * x).sum(axis=-1) for x in wide], axis=-1)
    # Padding adds nothing; a KV head counts once for each part that holds it.
    counts = (config.n_heads, config.n_kv_heads * config.heads.repeats)
    means = total(squares, axes) / (jnp.array(counts, jnp.float32) * config.head_dim)
    factors = jax.lax.rsqrt(means + config.norm_eps)
    q_factor, k_factor = factors[:, :1], factors[:, 1:]
    q = (wide[0] * q_factor * weights["q_norm"]).astype(q.dtype)
    return q, (wide[1] * k_factor * weights["k_norm"]).astype(k.dtype)


def head(params: Params, x: jax.Array, config: ModelConfig) -> jax.Array:
    """Logits float32 `[T, V]` of the decoder's output `x [T, D]`: final norm, head, scale, cap.

    Where the vocabulary is split, those of this part's tokens; see `whole_vocabulary`.
    """
    weight = params["embedding"] if config.tied_head else params["head"]
    norm = (params["final_norm"], config.norm_eps)
    dtype = jnp.dtype("float32")
    logits = ops.products(x, (weight,), config.kernels, norm=norm, dtype=dtype)[0]
    return ops.softcap(logits * config.logit_scale, config.logit_softcap)


def whole_vocabulary(logits: jax.Array, config: ModelConfig) -> jax.Array:
    """From this part's logits of all rows to all logits of this part's rows, by one all-to-all.

    `[T, V/n]` becomes `[ceil(T/n), V]`: no device ever holds all rows, and each logit moves once.
    Rows are dealt in order, padded at the end. Without a split vocabulary nothing happens.
    """
    vocab = config.split.axes("vocab")
    rows = padded_rows(logits, config.split.size(vocab))
    return exchanged(rows, vocab)[:, : config.vocab_size]
