"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), absorbed."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from ..sharding.collectives import dealt, total
from . import ops
from .config import ModelConfig
from .parameters import Params
from .parts import Latent


def latent_block(
    weights: Params,
    pages: jax.Array,
    x: jax.Array,
    turn: tuple[jax.Array, jax.Array],
    layout: ops.Layout,
    config: ModelConfig,
    latent: Latent,
) -> tuple[jax.Array, jax.Array]:
    """Projections, attention over latent pages and output projection of `x [T, D]`, with norms.

    A head's key is W_UK c and its value W_UV c, for the token's latent vector c. Rather than
    expand every cached c, the query goes through the transpose of W_UK once, meets c itself, and
    the sum of the c's goes through W_UV.

    Args:
      weights: of the layer.
      pages: `[P, Z, W]`.
      x: input `[T, D]`.
      turn: cosines and sines `[T, rope_dim/2]`.
      layout: where the rows sit.
      config: the architecture.
      latent: `config.latent`.

    Returns:
      `[T, D]`, and the pages.
    """
    T, eps = x.shape[0], config.norm_eps
    context = config.split.axes("context")
    # Of all rows: those of this device where several share a context.
    cos, sin = (dealt(table, config.split.size(context), context) for table in turn)
    norm = (weights["attn_norm"], eps) if config.pre_norm else None
    first = "q_a" if latent.q_rank else "q"
    q, kv = ops.products(x, (weights[first], weights["kv_a"]), config.kernels, norm=norm)
    if latent.q_rank:
        norm = (weights["q_a_norm"], eps)
        (q,) = ops.products(q, (weights["q_b"],), config.kernels, norm=norm)
    q = q.reshape(T, -1, latent.head_dim)
    plain = ops.head_matmul(q[..., : latent.nope_dim], weights["k_b"], config.kernels)
    attend = ops.latent_attention
    if context:
        attend = functools.partial(ops.shared_latent_attention, axes=context)
    out, pages = attend(
        jnp.concatenate([plain, q[..., latent.nope_dim :]], axis=-1),
        kv,
        pages,
        layout,
        config.kernels,
        norm=(weights["kv_a_norm"], eps),
        turn=(cos, sin),
        rank=latent.kv_rank,
        scale=config.score_scale,
    )
    out = ops.head_matmul(out, weights["v_b"], config.kernels)
    out = ops.matmul(out.reshape(T, -1), weights["o"], config.kernels)
    out = total(out, config.split.axes("heads"))
    if config.post_norm:
        out = ops.rms_norm(out, weights["attn_post_norm"], eps, config.kernels)
    return out, pages
