"""What requests change in the logits before a token is drawn: biases, penalties, banned tokens.

In this order, as vLLM applies them: biases, repetition penalty, frequency and presence penalty; and
last what may not be generated becomes -inf, so that nothing lifts a ban. Rows that ask for nothing
keep their logits bit for bit, and what no row asks for costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ..sampling import WORD, Sampling

#: Logits `[B, V]` to logits.
Edit = Callable[[jax.Array], jax.Array]


def wants_edits(sampling: Sampling, positions: jax.Array) -> jax.Array:
    """bool scalar: whether any row changes its logits at `positions` (int32 `[B]`)."""
    return (
        _has_bias(sampling).any()
        | _has_penalty(sampling).any()
        | _has_ban(sampling, positions).any()
    )


def edit(
    logits: jax.Array, sampling: Sampling, history: jax.Array, positions: jax.Array
) -> jax.Array:
    """`logits [B, V]` as each of the B rows of `sampling` changes them.

    Args:
      logits: float32 `[B, V]`.
      sampling: B rows.
      history: int32 `[B, C]`; the first positions[b] of row b are the tokens so far, prompt and
        reply; the rest is not read.
      positions: int32 `[B]`.
    """

    def when(wanted: jax.Array, change: Edit, logits: jax.Array) -> jax.Array:
        return jax.lax.cond(wanted.any(), change, lambda logits: logits, logits)

    def penalise(logits: jax.Array) -> jax.Array:
        return _penalise(logits, sampling, history, positions)

    def ban(logits: jax.Array) -> jax.Array:
        return jnp.where(_allowed(logits.shape[-1], sampling, positions), logits, -jnp.inf)

    logits = when(_has_bias(sampling), lambda logits: _add_bias(logits, sampling), logits)
    logits = when(_has_penalty(sampling), penalise, logits)
    return when(_has_ban(sampling, positions), ban, logits)


def _has_bias(sampling: Sampling) -> jax.Array:
    return sampling.bias_ids[:, 0] >= 0


def _has_penalty(sampling: Sampling) -> jax.Array:
    added = (sampling.presence != 0) | (sampling.frequency != 0)
    return (sampling.repetition != 1) | added


def _has_ban(sampling: Sampling, positions: jax.Array) -> jax.Array:
    return sampling.has_mask | _has_closed_ends(sampling, positions)


def _has_closed_ends(sampling: Sampling, positions: jax.Array) -> jax.Array:
    return (positions < sampling.min_lens) & (sampling.end_ids[:, 0] >= 0)


def _add_bias(logits: jax.Array, sampling: Sampling) -> jax.Array:
    return _scatter_add(logits, sampling.bias_ids, sampling.bias_values)


def _scatter_add(rows: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
    """Adds `values [B, n]` to `rows [B, V]` at `ids [B, n]`; negative ids are left out."""
    row = jnp.arange(rows.shape[0])[:, None]
    # Negative indices would count from the end, even under mode="drop".
    return rows.at[row, jnp.where(ids < 0, rows.shape[-1], ids)].add(values, mode="drop")


def _penalise(
    logits: jax.Array, sampling: Sampling, history: jax.Array, positions: jax.Array
) -> jax.Array:
    """Repetition penalty over prompt and reply, frequency and presence penalty over the reply."""
    place = jnp.arange(history.shape[-1])[None]
    known = place < positions[:, None]
    reply = known & (place >= sampling.prompt_lens[:, None])
    zeros = jnp.zeros_like(logits)

    def count(tokens: jax.Array) -> jax.Array:
        return _scatter_add(zeros, jnp.where(tokens, history, -1), jnp.ones(history.shape))

    def repeat(logits: jax.Array) -> jax.Array:
        factor = sampling.repetition[:, None]
        weaker = jnp.where(logits < 0, logits * factor, logits / factor)
        return jnp.where(count(known) > 0, weaker, logits)

    repeated = (sampling.repetition != 1).any()
    logits = jax.lax.cond(repeated, repeat, lambda logits: logits, logits)

    def subtract(logits: jax.Array) -> jax.Array:
        said = count(reply)
        logits = logits - sampling.frequency[:, None] * said
        return logits - sampling.presence[:, None] * (said > 0)

    added = ((sampling.presence != 0) | (sampling.frequency != 0)).any()
    return jax.lax.cond(added, subtract, lambda logits: logits, logits)


def _allowed(width: int, sampling: Sampling, positions: jax.Array) -> jax.Array:
    """bool `[B, V]`: the row's mask, less the end ids while these are closed.

    A mask that holds nothing but end ids keeps them: something must be generated.
    """
    words = sampling.allowed
    row = jnp.arange(words.shape[0])[:, None]
    closed = _has_closed_ends(sampling, positions)[:, None] & (sampling.end_ids >= 0)
    word = jnp.where(closed, sampling.end_ids // WORD, words.shape[-1])
    bit = jnp.uint32(1) << (sampling.end_ids % WORD).astype(jnp.uint32)
    # End ids are distinct, so that adding their bits is joining them.
    ends = jnp.zeros_like(words).at[row, word].add(bit, mode="drop")
    open_words = words & ~ends
    words = jnp.where((open_words != 0).any(axis=-1, keepdims=True), open_words, words)
    bits = (words[:, :, None] >> jnp.arange(WORD, dtype=jnp.uint32)) & 1
    return bits.reshape(words.shape[0], -1)[:, :width] != 0
