"""Choosing tokens from logits, and their summary, in plain XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ..sampling import Sampling
from .edit import edit, wants_edits

#: Tokens whose weights are added up before they meet those of others. Fixed, so that a row's sums,
#: and with them its token, do not depend on how many rows there are.
BLOCK = 512


def sample(
    logits: jax.Array,
    sampling: Sampling,
    history: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    uniform: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """One token for each row, and the logarithm of the sum of the row's exponentials.

    First come biases, penalties and bans (`edit`), then temperature, top_k, top_p and min_p, as
    Hugging Face applies them: each filter sees only what those before it kept. Tokens as likely as
    the last one kept are kept too. The token is where the running sum of the kept probabilities, in
    order of id, first exceeds `uniform`: one number decides a draw. A row's result depends on that
    row only, but for the last bits of sums where XLA orders them otherwise.

    Args:
      logits: float32 `[B, V]`; -inf for what cannot be.
      sampling: S rows.
      history: int32 `[S, C]`; the first positions[b] of row slots[b] are the tokens before the one
        that is chosen, prompt and reply; the rest is not read.
      slots: int32 `[B]`, the row of `sampling` and `history` that each row of logits takes; from
        S on, which is padding, the last.
      positions: int32 `[B]`, the position that each chosen token will take.
      uniform: float32 `[B]` in [0, 1).

    Returns:
      Tokens int32 `[B]`, and float32 `[B]`, of the logits before all edits: NaN or infinite where a
      row holds NaN or +inf, or nothing but -inf. The token of such a row is some id in range.
    """
    rows = sampling.rows_of(slots)

    def edited() -> jax.Array:
        return edit(logits, rows, history.at[slots].get(mode="clip"), positions)

    values = jax.lax.cond(wants_edits(rows, positions), edited, lambda: logits)
    best = first_largest(values)
    greedy = rows.temperature <= 0
    temperature = jnp.where(greedy, 1, rows.temperature)
    drawn = jax.lax.cond(
        jnp.all(greedy),
        lambda: best,
        lambda: _draw(values, temperature, rows.top_k, rows.top_p, rows.min_p, uniform),
    )
    return jnp.where(greedy, best, drawn), jax.nn.logsumexp(logits, axis=-1)


def largest(logits: jax.Array, wanted: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The largest of each wanted row of `logits [B, V]`, falling, and their ids; `[B, count]`.

    Of equal logits the smaller id comes first. Beyond V, and in rows that are not wanted (bool
    `[B]`): -inf, and the id -1. Costs nothing where no row is wanted.
    """
    shape = (logits.shape[0], count)
    nothing = jnp.full(shape, -jnp.inf), jnp.full(shape, -1, jnp.int32)
    known = min(count, logits.shape[1])
    if known == 0:
        return nothing

    def find() -> tuple[jax.Array, jax.Array]:
        values, ids = jax.lax.top_k(logits, known)
        missing = ((0, 0), (0, count - known))
        values = jnp.pad(values, missing, constant_values=-jnp.inf)
        ids = jnp.pad(ids.astype(jnp.int32), missing, constant_values=-1)
        rows = wanted[:, None]
        return jnp.where(rows, values, nothing[0]), jnp.where(rows, ids, nothing[1])

    return jax.lax.cond(wanted.any(), find, lambda: nothing)


def first_largest(values: jax.Array) -> jax.Array:
    """`argmax` over the last axis; of a row with NaN, some index in range.

    XLA on CPU vectorises two plain reductions, but not argmax's reduction of pairs.
    """
    width = values.shape[-1]
    index = jax.lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    peak = values.max(axis=-1, keepdims=True)
    return jnp.where(values == peak, index, width - 1).min(axis=-1)


def _draw(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    uniform: jax.Array,
) -> jax.Array:
    peak = logits.max(axis=-1, keepdims=True)
    scaled = (logits - peak) / temperature[:, None]
    least = threshold(scaled, top_k, top_p, min_p)
    return _invert(jnp.where(scaled >= least[:, None], jnp.exp(scaled), 0), uniform)


def threshold(scaled: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """The least value `[B]` that the filters keep of `scaled [B, V]`, whose largest is 0 in a row.

    Found by bisection on the order of float32 bit patterns, which is exact and needs no sort: the
    k-th largest value, then the smallest set that reaches top_p. A filter that no row uses costs
    nothing.
    """
    width = scaled.shape[-1]
    everything = jnp.full(scaled.shape[:1], -jnp.inf)
    k = jnp.where((top_k <= 0) | (top_k > width), width, top_k)

    def by_rank() -> jax.Array:
        return _largest_threshold(scaled, jnp.ones_like(scaled), k.astype(jnp.float32))

    least = jax.lax.cond(jnp.all(k == width), lambda: everything, by_rank)

    def by_mass() -> jax.Array:
        weights = jnp.where(scaled >= least[:, None], jnp.exp(scaled), 0)
        found = _largest_threshold(scaled, weights, top_p * _sums(weights).sum(axis=-1))
        # A top_p of 1 must keep all, whatever rounding made of the sum.
        return jnp.where(top_p >= 1, -jnp.inf, found)

    least = jnp.maximum(least, jax.lax.cond(jnp.all(top_p >= 1), lambda: everything, by_mass))
    return jnp.minimum(jnp.maximum(least, jnp.log(min_p)), 0)


def _largest_threshold(values: jax.Array, weights: jax.Array, wanted: jax.Array) -> jax.Array:
    """The largest t `[B]` for which the weights of values >= t add up to `wanted [B]`.

    Values are at most 0, so that their negated bit patterns are ordered integers.
    """

    def to_float(order: jax.Array) -> jax.Array:
        return -jax.lax.bitcast_convert_type(order, jnp.float32)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # to_float(high) reaches `wanted`; order rises as the value falls
        middle = low + (high - low) // 2
        above = jnp.where(values >= to_float(middle)[:, None], weights, 0)
        reached = _sums(above).sum(axis=-1) >= wanted
        return jnp.where(reached, low, middle + 1), jnp.where(reached, middle, high)

    infinity = int(np.float32(np.inf).view(np.int32))
    low = jnp.zeros(values.shape[0], jnp.int32)
    _, high = jax.lax.fori_loop(0, 32, halve, (low, jnp.full_like(low, infinity)))
    return to_float(high)


def _blocks(weights: jax.Array) -> jax.Array:
    """`[B, V]` as `[B, ceil(V / BLOCK), BLOCK]`, padded with zeros."""
    rows, width = weights.shape
    padded = jnp.pad(weights, ((0, 0), (0, -width % BLOCK)))
    return padded.reshape(rows, -1, BLOCK)


def _sums(weights: jax.Array) -> jax.Array:
    """The sum of each block of `weights [B, V]`."""
    return _blocks(weights).sum(axis=-1)


def _invert(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """The id int32 `[B]` at which the running sum of `weights [B, V]` passes its share `uniform`.

    First the block, then the id in it. Where rounding lets the sum end too soon, the last id that
    has a weight.
    """
    blocks = _blocks(weights)
    running = jnp.cumsum(blocks.sum(axis=-1), axis=-1)
    target = uniform * running[:, -1]
    block = _first_above(running, target)
    before = jnp.take_along_axis(running, jnp.maximum(block - 1, 0)[:, None], axis=-1)[:, 0]
    rest = target - jnp.where(block > 0, before, 0)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    token = block * BLOCK + _first_above(jnp.cumsum(inside, axis=-1), rest)
    return jnp.clip(token, 0, weights.shape[-1] - 1)


def _first_above(running: jax.Array, target: jax.Array) -> jax.Array:
    """The first index at which a row of rising sums exceeds its target; or the last that adds."""
    first = (running <= target[:, None]).sum(axis=-1)
    last = (running < running[:, -1:]).sum(axis=-1)
    return jnp.minimum(first, last).astype(jnp.int32)
