"""Hands what goes on around a mixture of experts to the implementation that `Kernels` names."""

from __future__ import annotations

import jax

from ..config import Kernels
from ..parts import Router
from . import cpu, xla


def route(
    logits: jax.Array,
    choice_bias: jax.Array | None,
    n_chosen: int,
    normalise: bool,
    router: Router,
    kernels: Kernels,
) -> tuple[jax.Array, jax.Array]:
    """Weights float32 and numbers int32 of the experts of each row, both `[T, n_chosen]`.

    Args and results as of `xla.route`, which says more.
    """
    implementation = cpu.route if kernels.platform == "cpu" else xla.route
    return implementation(logits, choice_bias, n_chosen, normalise, router)


def deal(
    chosen: jax.Array, first: jax.Array | int, held: int, kernels: Kernels
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows sorted by expert: their numbers `[T n]`, places `[T, n]` and sizes `[held]`, all int32.

    Args and results as of `xla.deal`, which says more.
    """
    implementation = cpu.deal if kernels.platform == "cpu" else xla.deal
    return implementation(chosen, first, held)


def combine(x: jax.Array, places: jax.Array, weights: jax.Array, kernels: Kernels) -> jax.Array:
    """Rows `places [T, n]` of `x [N, D]`, summed by `weights [T, n]`: `[T, D]` in x's dtype."""
    implementation = cpu.combine if kernels.platform == "cpu" else xla.combine
    return implementation(x, places, weights).astype(x.dtype)
