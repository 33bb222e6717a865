"""Hands each operation to the implementation that `Kernels` names."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..config import Kernels
from ..errors import StokerError
from ..quantized import QuantArray, Weight, densify
from . import cpu, elementwise, xla
from .choices import (
    attention_choice,
    grouped_choice,
    head_choice,
    implementation,
    latent_choice,
    product_choice,
)
from .elementwise import gated, rotate
from .layout import Layout
from .quant_pages import Pages, tpu_values_by_token
from .sampling import Sampling
from .visits import groups_as_heads, heads_as_groups

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
        normed = x if norm is None else elementwise.rms_norm(x, *norm)
        results = tuple(_product(normed, weight, kernels, dtype or x.dtype) for weight in weights)
    return tuple(result.astype(dtype or x.dtype) for result in results)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, kernels: Kernels) -> jax.Array:
    """`x [..., D]` over its root mean square, times `weight [D]`: in float32, then x's dtype."""
    if kernels.platform != "cpu":
        return elementwise.rms_norm(x, weight, eps)
    return cpu.rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).reshape(x.shape).astype(x.dtype)


def matmul(x: jax.Array, weight: AnyWeight, kernels: Kernels) -> jax.Array:
    """`x [T, C]` times the transpose of `weight [R, C]`: `[T, R]` in x's dtype."""
    return products(x, (weight,), kernels)[0]


def gated_matmul(
    gate: jax.Array, up: jax.Array, weight: AnyWeight, kernels: Kernels, activation: str
) -> jax.Array:
    """`gated(gate, up)`, both `[T, F]`, times the transpose of `weight [R, F]`: `[T, R]`.

    `activation` is one of `models.config.ACTIVATIONS`; the result has gate's dtype.
    """
    if kernels.platform == "cpu":
        result = cpu.gated_matmul(
            gate, up, _packed(weight), activation=activation, activations=kernels.activations
        )
    else:
        result = _product(gated(gate, up, activation), weight, kernels, gate.dtype)
    return result.astype(gate.dtype)


def grouped_products(
    x: jax.Array,
    weights: Sequence[AnyWeight],
    sizes: jax.Array,
    kernels: Kernels,
    biases: Sequence[jax.Array | None] | None = None,
    rows: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Rows `x [T, C]` times their group's matrix of each weight `[E, R_i, C]`: `[T, R_i]`.

    Args:
      x: the first `sizes[0]` rows belong to group 0, and so on.
      weights: matrices of E groups each.
      sizes: int32 `[E]`, which sum to T.
      kernels: who computes.
      biases: float32 `[E, R_i]` that are added, or None, for each weight.
      rows: int32 `[T]`; what is multiplied are these rows of x, which may then have any number.

    Returns:
      For each weight, in x's dtype.
    """
    biases = biases or (None,) * len(weights)
    if kernels.platform == "cpu":
        packed = [_packed(weight) for weight in weights]
        results = cpu.grouped_products(
            x, packed, sizes, biases=biases, rows=rows, activations=kernels.activations
        )
    else:
        x = x if rows is None else x[rows]
        results = tuple(
            _grouped_product(x, weight, sizes, bias, kernels)
            for weight, bias in zip(weights, biases, strict=True)
        )
    return tuple(result.astype(x.dtype) for result in results)


def grouped_gated_matmul(
    gate: jax.Array,
    up: jax.Array,
    weight: AnyWeight,
    sizes: jax.Array,
    kernels: Kernels,
    activation: str,
    bias: jax.Array | None = None,
) -> jax.Array:
    """`gated(gate, up)`, both `[T, F]`, times each row's matrix of `weight [E, R, F]`: `[T, R]`.

    As of `gated_matmul`, with the groups and the bias of `grouped_products`.
    """
    if kernels.platform == "cpu":
        result = cpu.grouped_gated_matmul(
            *(gate, up, _packed(weight), sizes),
            activation=activation,
            bias=bias,
            activations=kernels.activations,
        )
    else:
        x = gated(gate, up, activation)
        result = _grouped_product(x, weight, sizes, bias, kernels)
    return result.astype(gate.dtype)


def head_matmul(x: jax.Array, weight: AnyWeight, kernels: Kernels) -> jax.Array:
    """`x [T, N, C]` times the transpose of each head's matrix of `weight [N, R, C]`: `[T, N, R]`.

    The result has x's dtype. On the CPU, heads are the groups of `cpu.grouped_products`.
    """
    if kernels.platform != "cpu":
        plain = _plain(weight)
        chosen = head_choice(kernels, plain).implementation
        if chosen == "xla":
            return xla.head_matmul(x, plain).astype(x.dtype)
        return implementation(chosen).head_matmul(x, plain, dtype=x.dtype)
    rows, sizes = heads_as_groups(x)
    (result,) = grouped_products(rows, (weight,), sizes, kernels)
    return groups_as_heads(result, len(sizes))


def _product(
    x: jax.Array, weight: AnyWeight, kernels: Kernels, dtype: jnp.dtype | type
) -> jax.Array:
    """`x [T, C]` times the transpose of `weight [R, C]`, not by the CPU kernels: `[T, R]`."""
    plain = _plain(weight)
    chosen = product_choice(kernels, plain)
    if chosen.implementation == "xla":
        return xla.matmul(x, plain)
    module = implementation(chosen.implementation)
    product = module.integer_matmul if chosen.integers(x.shape[0]) else module.matmul
    return product(x, plain, dtype=dtype)


def _grouped_product(
    x: jax.Array, weight: AnyWeight, sizes: jax.Array, bias: jax.Array | None, kernels: Kernels
) -> jax.Array:
    """`grouped_products` of one weight, not by the CPU kernels."""
    plain = _plain(weight)
    chosen = grouped_choice(kernels, plain)
    if chosen.implementation == "xla":
        return xla.grouped_matmul(x, plain, sizes, bias)
    module = implementation(chosen.implementation)
    integers = chosen.integers(x.shape[0] // len(sizes))
    product = module.integer_grouped_matmul if integers else module.grouped_matmul
    if bias is None:
        return product(x, plain, sizes, dtype=x.dtype)
    out = product(x, plain, sizes)
    return out + xla.rows_of_groups(bias, sizes, x.shape[0])


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
    if isinstance(table, QuantArray) and tokens.shape[0] == 1:
        # Two rows of codes are a gather; one would be a slice, for which TPU compilers lay all of
        # the table out anew in every step.
        codes = table.codes[jnp.repeat(tokens, 2)][:1]
        return densify(dataclasses.replace(table[tokens], codes=codes), dtype)
    return densify(table[tokens], dtype)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    layout: Layout,
    kernels: Kernels,
    *,
    turn: tuple[jax.Array, jax.Array],
    scale: float,
    sinks: jax.Array | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[jax.Array, Pages, Pages]:
    """Rotates q and k, appends keys and values to the pages, and attends causally over live pages.

    Args and results as of `xla.attention`, which says more, but for q and k, which are not rotated
    yet, and `turn`: cosines and sines `[T, dims/2]` from `rotary_tables`.
    """
    return _attend(
        *("attention", kernels, turn, q, k, v, k_pages, v_pages, layout),
        scale=scale,
        sinks=sinks,
        window=window,
        softcap=softcap,
    )


def partial_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    layout: Layout,
    kernels: Kernels,
    *,
    share: jax.Array | int,
    shares: int,
    turn: tuple[jax.Array, jax.Array],
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[jax.Array, jax.Array, Pages, Pages]:
    """`attention` over one of `shares` shares of each page's tokens; see `xla.partial_attention`.

    By the implementation that serves `attention`.
    """
    return _attend(
        *("partial_attention", kernels, turn, q, k, v, k_pages, v_pages, layout),
        share=share,
        shares=shares,
        scale=scale,
        window=window,
        softcap=softcap,
    )


def _attend(
    operation: str,
    kernels: Kernels,
    turn: tuple[jax.Array, jax.Array],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    layout: Layout,
    **options: Any,
) -> Any:
    """What the implementation of that name returns; `options` are passed on."""
    if kernels.platform == "cpu":
        options |= {"turn": turn, "rounded": kernels.activations != "float32"}
        chosen = "cpu"
    else:
        q, k = rotate(q, *turn), rotate(k, *turn)
        chosen = attention_choice(kernels, q.shape[-1], jax.tree.leaves(k_pages)[0]).implementation
        if chosen == "xla":
            options["by_token"] = kernels.platform != "tpu" or tpu_values_by_token(q.shape[-1])
    return getattr(implementation(chosen), operation)(q, k, v, k_pages, v_pages, layout, **options)


def latent_attention(
    q: jax.Array,
    latent: jax.Array,
    pages: jax.Array,
    layout: Layout,
    kernels: Kernels,
    *,
    norm: Norm,
    turn: tuple[jax.Array, jax.Array],
    rank: int,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Norms and rotates, appends latent vectors to the pages, and attends over live pages.

    Args and results as of `xla.latent_attention`, which says more, but for q and latent vectors:
    what is past `rank` is not rotated yet, by `turn`, cosines and sines `[T, dims/2]`, and what is
    before it in latent vectors not normed, by `norm`.
    """
    options: dict[str, Any] = {"rank": rank, "scale": scale}
    if kernels.platform == "cpu":
        options |= {"norm": norm, "turn": turn, "rounded": kernels.activations != "float32"}
        return cpu.latent_attention(q, latent, pages, layout, **options)
    q, latent = latent_rows(q, latent, rank, norm, turn)
    chosen = latent_choice(kernels, rank, q.shape[-1], pages).implementation
    return implementation(chosen).latent_attention(q, latent, pages, layout, **options)


def partial_latent_attention(
    q: jax.Array,
    latent: jax.Array,
    pages: jax.Array,
    layout: Layout,
    kernels: Kernels,
    *,
    share: jax.Array | int,
    shares: int,
    rank: int,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`latent_attention` of normed and rotated rows over one of `shares` shares of each page.

    By the implementation that serves `latent_attention`; see `xla.partial_latent_attention`.
    """
    options: dict[str, Any] = {"rank": rank, "scale": scale, "share": share, "shares": shares}
    if kernels.platform == "cpu":
        options["rounded"] = kernels.activations != "float32"
        return cpu.partial_latent_attention(q, latent, pages, layout, **options)
    chosen = latent_choice(kernels, rank, q.shape[-1], pages).implementation
    return implementation(chosen).partial_latent_attention(q, latent, pages, layout, **options)


def latent_rows(
    q: jax.Array, latent: jax.Array, rank: int, norm: Norm, turn: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Queries `[T, N, W]` and latent vectors `[T, W]`, rotated past `rank` and normed before it."""
    q = jnp.concatenate([q[..., :rank], rotate(q[..., rank:], *turn)], axis=-1)
    key = rotate(latent[:, None, rank:], *turn)[:, 0]
    return q, jnp.concatenate([elementwise.rms_norm(latent[:, :rank], *norm), key], axis=-1)


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
