"""RMS norm, rotary embedding and activations: what XLA fuses well on every platform."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..config import Rope


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`x [T, D]` over its root mean square, times `weight [D]` (Zhang & Sennrich 2019).

    Computed in float32, returned in x's dtype.
    """
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + eps) * weight).astype(x.dtype)


def rotary_tables(positions: jax.Array, rope: Rope) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine `[T, dims/2]`, float32, of each position `[T]` at each frequency.

    Both are multiplied by `rope.attention_factor`.
    """
    angles = positions[:, None].astype(jnp.float32) * jnp.asarray(rope.frequencies(), jnp.float32)
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the leading `dims` of each head of `x [T, heads, H]`, element i with i + dims/2."""
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    first = x[..., :half].astype(jnp.float32)
    second = x[..., half : 2 * half].astype(jnp.float32)
    turned = [first * cos - second * sin, second * cos + first * sin]
    rotated = jnp.concatenate(turned, axis=-1).astype(x.dtype)
    return jnp.concatenate([rotated, x[..., 2 * half :]], axis=-1)


#: Of the clamped SwiGLU: factor in the sigmoid, and bound of gate and up.
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0


def gated(gate: jax.Array, up: jax.Array, name: str) -> jax.Array:
    """What activation `name` (see `models.config.ACTIVATIONS`) makes of `gate` and `up`, `[T, F]`.

    SiLU or GELU of the gate, times up. Or GPT-OSS's `g * sigmoid(alpha * g) * (u + 1)`, with gate
    bounded from above and up on both sides (`openai/gpt-oss`, `swiglu` of `torch/model.py`).
    """
    if name == "silu":
        return jax.nn.silu(gate) * up
    if name == "gelu_tanh":
        return jax.nn.gelu(gate, approximate=True) * up
    if name == "clamped_swiglu":
        gate = jnp.minimum(gate, SWIGLU_LIMIT)
        up = jnp.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
        return gate * jax.nn.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)
    raise ValueError(f"unknown activation {name!r}")


def softcap(x: jax.Array, cap: float) -> jax.Array:
    """`cap * tanh(x / cap)` (Bello et al. 2016), or x itself where the cap is 0."""
    return cap * jnp.tanh(x / cap) if cap else x
