"""The pure steps: functions of arrays to arrays, usable under `jit`, `lax.scan` and a mesh.

Each is `(params, cache, state, batch) -> (cache, state, outputs)` with a hashable static config.
`jit` them with `donate_argnames=("cache", "state")` and caches are updated in place;
`engine/programs.py` does so and checks it.

A step runs B sequences, each of which has a slot: one of the S rows of the state. A sequence whose
slot is S is padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ..models import ops
from ..models.config import ModelConfig
from ..models.ops.layout import DUMP_PAGE, Layout
from ..models.parameters import Params
from ..models.transformer import decoder, head, whole_vocabulary
from ..sharding.collectives import dealt, padded_rows
from .cache import Cache
from .sampling import Outputs, choose_split, gather_rows
from .sampling_params import SamplingParams
from .sampling_rows import pack_ends, pack_sampling

#: In `PrefillBatch.tokens`: the newest token of the slot, which the host may not know yet.
NEWEST = -1


@struct.dataclass
class State:
    """What the device remembers of each slot between steps.

    Attributes:
      tokens: int32 `[S]`, the newest token, whose keys and values are not in the cache yet.
      lengths: int32 `[S]`, tokens in the cache; decoding past the M * Z that a slot's pages hold is
        an error of the CPU kernels, and NaN logits elsewhere.
      history: int32 `[S, C]`, the tokens at each position, for penalties.
      ends: int32 `[S, E]`, tokens that end the slot's reply, padded with -1: after one of them was
        chosen, the slot takes no further decode step.
      sampling: how the slot's tokens are chosen.
    """

    tokens: jax.Array
    lengths: jax.Array
    history: jax.Array
    ends: jax.Array
    sampling: ops.Sampling


@struct.dataclass
class PrefillBatch:
    """Rows of any of the slots, flat: chunks of prompts, and newest tokens of running replies.

    Attributes:
      tokens: int32 `[T]`, or `NEWEST`; sequence b has rows query_start[b]:query_start[b+1], the
        rest is padding.
      query_start: int32 `[B+1]`.
      cached: int32 `[B]`, the sequence's tokens that are in the cache already.
      page_table: int32 `[B, M]`.
      slots: int32 `[B]`.
      samples: bool `[B]`, the token after the sequence's last row is to be chosen.
    """

    tokens: jax.Array
    query_start: jax.Array
    cached: jax.Array
    page_table: jax.Array
    slots: jax.Array
    samples: jax.Array


@struct.dataclass
class DecodeBatch:
    """Sequences that take a decode step.

    Attributes:
      page_table: int32 `[B, M]`.
      slots: int32 `[B]`.
      limits: int32 `[B]`, tokens in the cache at which a sequence takes no further step, as after a
        token that ends it: its slot keeps its state, and it writes to the dump page.
    """

    page_table: jax.Array
    slots: jax.Array
    limits: jax.Array


@struct.dataclass
class Scores:
    """What a score step found, for each of its rows.

    Attributes:
      logprobs: float32 `[T]`, of the targets.
      top_ids: int32 `[T, K]`, the most likely tokens.
      top_logprobs: float32 `[T, K]`, theirs.
    """

    logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def new_state(
    requests: Sequence[SamplingParams],
    vocab_size: int,
    context: int,
    prompt_lens: Sequence[int] | None = None,
    end_ids: Sequence[int] = (),
) -> State:
    """The state of slots that have nothing cached yet, one for each request.

    Args:
      requests: how each slot's tokens are chosen.
      vocab_size: V.
      context: most tokens that a slot may hold (C).
      prompt_lens: where each slot's reply begins; 0 if None, which only penalties, `min_tokens` and
        prompts with end tokens can tell.
      end_ids: the model's end tokens: they end replies, but not before `min_tokens`.
    """
    slots = len(requests)
    arrays: dict[str, Any] = {
        "tokens": np.zeros(slots, np.int32),
        "lengths": np.zeros(slots, np.int32),
        "history": np.zeros((slots, context), np.int32),
        "ends": pack_ends(requests, end_ids),
        "sampling": pack_sampling(requests, vocab_size, prompt_lens, end_ids),
    }
    return _copied(State(**arrays))


@jax.jit
def _copied(state: State) -> State:
    """In memory of JAX's own: what is donated must not be NumPy's. One program for all arrays."""
    return jax.tree.map(jnp.copy, state)


def admit(state: State, slot: jax.Array, row: State) -> State:
    """The state with one slot set to what `row` says (each array without its first axis)."""
    return jax.tree.map(lambda whole, new: whole.at[slot].set(new), state, row)


def prefill_layout(batch: PrefillBatch) -> Layout:
    """Where the rows of a prefill chunk sit: a slot may own any number of them."""
    batch = jax.tree.map(jnp.asarray, batch)
    rows = batch.query_start[1:] - batch.query_start[:-1]
    return Layout(
        query_start=batch.query_start,
        kv_lens=batch.cached + rows,
        page_table=batch.page_table,
        max_query=batch.tokens.shape[0],
    )


def decode_layout(state: State, batch: DecodeBatch) -> Layout:
    """Where the rows of a decode step sit: row b is sequence b."""
    batch = jax.tree.map(jnp.asarray, batch)
    lengths = _rows_of(state.lengths, batch.slots)
    active = _active(state, batch)
    return Layout(
        query_start=jnp.arange(batch.slots.shape[0] + 1, dtype=jnp.int32),
        kv_lens=jnp.where(active, lengths + 1, 1),
        page_table=jnp.where(active[:, None], batch.page_table, DUMP_PAGE),
        max_query=1,
    )


def prefill_logits(
    params: Params, cache: Cache, batch: PrefillBatch, *, config: ModelConfig
) -> tuple[Cache, jax.Array]:
    """Runs a chunk and returns the cache and the logits `[B, V]` of each sequence's last row.

    Where the vocabulary is split over a mesh, each device returns those of its tokens. Without a
    state, `NEWEST` stands for nothing: every token must be given.
    """
    cache, x = decoder(params, cache, batch.tokens, prefill_layout(batch), config)
    return cache, head(params, x[_last_rows(batch)], config)


def decode_logits(
    params: Params, cache: Cache, state: State, batch: DecodeBatch, *, config: ModelConfig
) -> tuple[Cache, jax.Array]:
    """Runs each active sequence's newest token; returns the cache and logits `[B, V]`."""
    layout = decode_layout(state, batch)
    cache, x = decoder(params, cache, _rows_of(state.tokens, batch.slots), layout, config)
    return cache, head(params, x, config)


def prefill(
    params: Params,
    cache: Cache,
    state: State,
    batch: PrefillBatch,
    *,
    config: ModelConfig,
    top: int = 0,
) -> tuple[Cache, State, Outputs]:
    """Runs a step's rows and samples what follows where the batch says so.

    Chunks of prompts and newest tokens of running replies may share it, and then share the reading
    of the weights. Slots that the batch does not name keep their state. Any chunking gives the same
    logits. `top` alternatives (static) are reported for the slots that want them.
    """
    batch = jax.tree.map(jnp.asarray, batch)
    layout = prefill_layout(batch)
    T = batch.tokens.shape[0]
    sequence, positions = layout.rows(T)
    slot = batch.slots[sequence]
    tokens = jnp.where(batch.tokens == NEWEST, _rows_of(state.tokens, slot), batch.tokens)
    outside = jnp.where(positions >= 0, slot, state.tokens.shape[0])
    history = state.history.at[outside, positions].set(tokens, mode="drop")
    cache, x = decoder(params, cache, tokens, layout, config)
    logits = head(params, x[_last_rows(batch)], config)

    # Rows that are not sampled from have no logits: their own numbers tell.
    broken = jnp.cumsum(jnp.pad(~jnp.isfinite(x).all(axis=-1), (1, 0)).astype(jnp.int32))
    sound = broken[batch.query_start[1:]] == broken[batch.query_start[:-1]]
    state = _lengthened(state, batch.slots, jnp.diff(batch.query_start) > 0, layout.kv_lens)
    state = dataclasses.replace(state, history=history)
    state, outputs = _choose(logits, state, batch.slots, batch.samples, layout.kv_lens, config, top)
    finite = sound & (outputs.finite | ~batch.samples)
    return cache, state, dataclasses.replace(outputs, finite=finite)


def decode(
    params: Params,
    cache: Cache,
    state: State,
    batch: DecodeBatch,
    *,
    config: ModelConfig,
    top: int = 0,
) -> tuple[Cache, State, Outputs]:
    """Appends each active sequence's newest token to the cache and samples the next one."""
    batch = jax.tree.map(jnp.asarray, batch)
    cache, logits = decode_logits(params, cache, state, batch, config=config)
    active = _active(state, batch)
    lengths = _rows_of(state.lengths, batch.slots) + 1
    state = _lengthened(state, batch.slots, active, lengths)
    state, outputs = _choose(logits, state, batch.slots, active, lengths, config, top)
    return cache, state, outputs


def decode_steps(
    params: Params,
    cache: Cache,
    state: State,
    batch: DecodeBatch,
    *,
    config: ModelConfig,
    top: int = 0,
    steps: int,
) -> tuple[Cache, State, Outputs]:
    """`steps` decode steps without the host; outputs have that axis first.

    A sequence that ends before the last of them neither writes nor attends in what remains, and its
    outputs there mean nothing.
    """

    def body(carry: tuple[Cache, State], _: None) -> tuple[tuple[Cache, State], Outputs]:
        cache, state, outputs = decode(params, *carry, batch, config=config, top=top)
        return (cache, state), outputs

    (cache, state), outputs = jax.lax.scan(body, (cache, state), length=steps)
    return cache, state, outputs


def score(
    params: Params,
    cache: Cache,
    state: State,
    batch: PrefillBatch,
    targets: jax.Array,
    *,
    config: ModelConfig,
    top: int = 0,
) -> tuple[Cache, State, Scores]:
    """Appends a chunk as `prefill` does, and scores the tokens that follow its rows.

    Element t of `logprobs` is the log-probability of `targets[t]` (int32 `[T]`) after row t.
    Nothing is sampled: the state's tokens stay what they were.
    """
    batch = jax.tree.map(jnp.asarray, batch)
    layout = prefill_layout(batch)
    cache, x = decoder(params, cache, batch.tokens, layout, config)
    logits = whole_vocabulary(head(params, x, config), config)
    vocab = config.split.axes("vocab")
    parts = config.split.size(vocab)
    own = dealt(padded_rows(jnp.asarray(targets), parts), parts, vocab)
    total = ops.logsumexp(logits, config.kernels)
    chosen = jnp.take_along_axis(logits, own[:, None], axis=-1)[:, 0]
    wanted = jnp.ones(total.shape, bool)
    best, top_ids = ops.largest(logits, wanted, top, config.kernels)
    state = _lengthened(state, batch.slots, jnp.diff(batch.query_start) > 0, layout.kv_lens)
    scores = Scores(logprobs=chosen - total, top_ids=top_ids, top_logprobs=best - total[:, None])
    if vocab:
        scores = gather_rows(scores, x.shape[0], vocab)
    return cache, state, scores


def _choose(
    logits: jax.Array,
    state: State,
    slots: jax.Array,
    samples: jax.Array,
    lengths: jax.Array,
    config: ModelConfig,
    top: int,
) -> tuple[State, Outputs]:
    """Chooses tokens `[B]` after `lengths` cached ones; those of `samples` enter the state."""
    outputs = choose_split(logits, state.sampling, state.history, slots, lengths, config, top)
    outside = state.tokens.shape[0]
    chosen = jnp.where(samples, slots, outside)
    state = dataclasses.replace(
        state,
        tokens=state.tokens.at[chosen].set(outputs.tokens, mode="drop"),
        history=state.history.at[chosen, lengths].set(outputs.tokens, mode="drop"),
    )
    return state, outputs


def _lengthened(state: State, slots: jax.Array, ran: jax.Array, lengths: jax.Array) -> State:
    """The state after the sequences that `ran` (bool `[B]`) brought their caches to `lengths`."""
    grown = jnp.where(ran, slots, state.lengths.shape[0])
    return dataclasses.replace(state, lengths=state.lengths.at[grown].set(lengths, mode="drop"))


def _active(state: State, batch: DecodeBatch) -> jax.Array:
    """bool `[B]`: sequences that are not padding, and have reached neither limit nor end."""
    inside = batch.slots < state.tokens.shape[0]
    lengths = _rows_of(state.lengths, batch.slots)
    newest = _rows_of(state.tokens, batch.slots)
    chosen = lengths >= _rows_of(state.sampling.prompt_lens, batch.slots)
    ended = chosen & (newest[:, None] == _rows_of(state.ends, batch.slots)).any(axis=-1)
    return inside & (lengths < batch.limits) & ~ended


def _rows_of(array: jax.Array, slots: jax.Array) -> jax.Array:
    """Rows `slots` of an array `[S, ...]`; of padding, some row."""
    return array.at[slots].get(mode="clip")


def _last_rows(batch: PrefillBatch) -> jax.Array:
    return jnp.maximum(jnp.asarray(batch.query_start)[1:] - 1, 0)
