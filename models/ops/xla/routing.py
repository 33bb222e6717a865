"""What goes on around a mixture of experts: the choice, the order of rows, and the sum."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ...parts import Router

#: What a sum of weights is kept above, as in DeepSeek's own code.
_EPSILON = 1e-20


def route(
    logits: jax.Array, choice_bias: jax.Array | None, n_chosen: int, normalise: bool, router: Router
) -> tuple[jax.Array, jax.Array]:
    """Weights and numbers of the experts of each row.

    Scores are the softmax, or the sigmoids, of the logits (Shazeer et al. 2017; with a sum of one,
    the softmax of those chosen). With groups, experts outside the best
    `used_groups` are out (DeepSeek-V2, arXiv 2405.04434, section 2.2.2). With a choice bias, the
    best are those of the largest biased scores, while weights come from the plain ones
    (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    Args:
      logits: float32 `[T, E]`.
      choice_bias: float32 `[E]`; None for none.
      n_chosen: experts of each row.
      normalise: the weights are made to sum to one before they are scaled.
      router: the rule.

    Returns:
      Weights float32 `[T, n_chosen]` and experts int32 `[T, n_chosen]`: the best first, and of
      equal ones the smaller number.
    """
    scores = jax.nn.sigmoid(logits) if router.scores == "sigmoid" else jax.nn.softmax(logits)
    ranked = scores if choice_bias is None else scores + choice_bias
    if router.used_groups < router.groups:
        ranked = _of_the_best_groups(ranked, router)
    _, chosen = jax.lax.top_k(ranked, n_chosen)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if normalise:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + _EPSILON)
    return weights * router.scale, chosen


def _of_the_best_groups(ranked: jax.Array, router: Router) -> jax.Array:
    """`ranked [T, E]` with -inf for experts outside the best groups of each row."""
    grouped = ranked.reshape(*ranked.shape[:-1], router.groups, -1)
    best = jax.lax.top_k(grouped, router.group_top)[0].sum(axis=-1)
    _, used = jax.lax.top_k(best, router.used_groups)
    inside = (used[..., None] == jnp.arange(router.groups)).any(axis=-2)
    return jnp.where(inside[..., None], grouped, -jnp.inf).reshape(ranked.shape)


def deal(
    chosen: jax.Array, first: jax.Array | int, held: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sorts the pairs of a row and one of its experts by expert.

    The experts of other devices count as one more, which comes last: every pair stays, however
    uneven the loads.

    Args:
      chosen: experts of each row, int32 `[T, n]`.
      first: the first expert that this device holds.
      held: how many it holds, from there on.

    Returns:
      The row of each pair in the new order, int32 `[T n]`; where in it each pair is, int32
      `[T, n]`; and how many pairs each held expert has, int32 `[held]`.
    """
    flat = chosen.reshape(-1) - first
    flat = jnp.where((flat < 0) | (flat >= held), held, flat)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=held).astype(jnp.int32)
    places = jnp.argsort(order).astype(jnp.int32).reshape(chosen.shape)
    return (order // chosen.shape[1]).astype(jnp.int32), places, sizes


def combine(x: jax.Array, places: jax.Array, weights: jax.Array) -> jax.Array:
    """Weighted sums of rows: the rows `places [T, n]` of `x [N, D]`, by `weights [T, n]`.

    Returns float32 `[T, D]`.
    """
    return jnp.sum(x[places].astype(jnp.float32) * weights[..., None], axis=1)
