"""Hands each operation to the implementation that `Kernels` names."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ..config import Kernels
from ..errors import StokerError
from ..quantized import QuantArray, Weight, densify
from . import cpu, xla
from .elementwise import activate, rms_norm, rotate
from .layout import Layout
from .sampling import Sampling

#: What a product multiplies with: also the layout that the CPU kernels stream.
AnyWeight = Weight | cpu.PackedArray


#: Weight `[D]` and epsilon of an RMS norm.
Norm = tuple[jax.Array, float]


def products(
    x: jax.Array,
    weights: Sequence[AnyWeight],
    kernels: Kernels,
    *,
    norm: Norm | None = None,
    dtype: jnp.dtype | None = None,
) -> tuple[jax.Array, ...]:
    """`x [T, C]` times the transpose of each weight `[R_i, C]`: `[T, R_i]` in `dtype` or x's.

    With `norm`, x goes through that RMS norm first.
    """
    if kernels.platform == "cpu":
        packed = [_packed(weight) for weight in weights]
        results = cpu.products(x, packed, norm=norm, activations=kernels.activations)
    else:
        normed = x if norm is None else rms_norm(x, *norm)
        results = tuple(xla.matmul(normed, _plain(weight)) for weight in weights)
    return tuple(result.astype(dtype or x.dtype) for result in results)


def matmul(x: jax.Array, weight: AnyWeight, kernels: Kernels) -> jax.Array:
    """`x [T, C]` times the transpose of `weight [R, C]`: `[T, R]` in x's dtype."""
    return products(x, (weight,), kernels)[0]


def gated_matmul(
    gate: jax.Array, up: jax.Array, weight: AnyWeight, kernels: Kernels, activation: str
) -> jax.Array:
    """`activation(gate) * up`, both `[T, F]`, times the transpose of `weight [R, F]`: `[T, R]`.

    `activation` is one of `models.config.ACTIVATIONS`; the result has gate's dtype.
    """
    if kernels.platform == "cpu":
        result = cpu.gated_matmul(
            gate, up, _packed(weight), activation=activation, activations=kernels.activations
        )
    else:
        result = xla.matmul(activate(gate, activation) * up, _plain(weight))
    return result.astype(gate.dtype)


def grouped_matmul(x: jax.Array, weight: Weight, sizes: jax.Array) -> jax.Array:
    """Rows `x [T, C]` times their group's matrix of `weight [E, R, C]`: `[T, R]` in x's dtype.

    See `xla.grouped_matmul`, the only implementation so far, with float32 activations everywhere.
    """
    return xla.grouped_matmul(x, weight, sizes).astype(x.dtype)


def _packed(weight: AnyWeight) -> jax.Array | cpu.PackedArray:
    if isinstance(weight, QuantArray):
        raise StokerError(
            f"a quantised weight of shape {list(weight.shape)} is not packed for the CPU kernels; "
            "pack it once with stoker.models.ops.cpu.pack, or load the model with kernels='cpu'"
        )
    return weight


def _plain(weight: AnyWeight) -> Weight:
    return cpu.unpack(weight) if isinstance(weight, cpu.PackedArray) else weight


def embed(table: AnyWeight, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows `tokens [T]` of `table [V, D]` as `[T, D]` of `dtype`; only these rows are read."""
    return densify(table[tokens], dtype)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    layout: Layout,
    kernels: Kernels,
    *,
    turn: tuple[jax.Array, jax.Array],
    scale: float,
    sinks: jax.Array | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotates q and k, appends keys and values to the pages, and attends causally over live pages.

    Args and results as of `xla.attention`, which says more, but for q and k, which are not rotated
    yet, and `turn`: cosines and sines `[T, dims/2]` from `rotary_tables`.
    """
    if kernels.platform == "cpu":
        return cpu.attention(
            *(q, k, v, k_pages, v_pages, layout),
            turn=turn,
            scale=scale,
            sinks=sinks,
            window=window,
            softcap=softcap,
        )
    q, k = rotate(q, *turn), rotate(k, *turn)
    return xla.attention(
        *(q, k, v, k_pages, v_pages, layout),
        scale=scale,
        sinks=sinks,
        window=window,
        softcap=softcap,
    )


def sample(
    logits: jax.Array,
    sampling: Sampling,
    history: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    uniform: jax.Array,
    kernels: Kernels,
) -> tuple[jax.Array, jax.Array]:
    """One token for each row of `logits [B, V]`, and the row's log of summed exponentials.

    Args and results as of `xla.sample`, which says more.
    """
    implementation = cpu.sample if kernels.platform == "cpu" else xla.sample
    return implementation(logits, sampling, history, slots, positions, uniform)


def logsumexp(logits: jax.Array, kernels: Kernels) -> jax.Array:
    """The second result of `sample` alone."""
    if kernels.platform == "cpu":
        return cpu.logsumexp(logits)
    return jax.nn.logsumexp(logits, axis=-1)


def largest(
    logits: jax.Array, wanted: jax.Array, count: int, kernels: Kernels
) -> tuple[jax.Array, jax.Array]:
    """The `count` largest of each wanted row of `logits [B, V]`, falling, and their ids.

    Args and results as of `xla.largest`, which says more.
    """
    implementation = cpu.largest if kernels.platform == "cpu" else xla.largest
    return implementation(logits, wanted, count)
