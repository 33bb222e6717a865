"""The pure steps: functions of arrays to arrays, usable under `jit`, `lax.scan` and a mesh.

Each is `(params, cache, state, batch) -> (cache, state, outputs)` with a hashable static config.
`jit` them with `donate_argnames=("cache", "state")` and caches are updated in place;
`engine/programs.py` does so and checks it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct

from ..models.config import ModelConfig
from ..models.ops.layout import DUMP_PAGE, Layout
from ..models.parameters import Params
from ..models.transformer import decoder, head
from .cache import Cache
from .sampling import Sampling, choose, pack_sampling
from .sampling_params import SamplingParams


@struct.dataclass
class State:
    """What the device remembers of each slot between steps.

    Attributes:
      tokens: int32 `[S]`, the newest token, whose keys and values are not in the cache yet.
      lengths: int32 `[S]`, tokens in the cache; decoding past the M * Z that a slot's pages hold is
        an error of the CPU kernels, and NaN logits elsewhere.
      sampling: how the slot's tokens are chosen.
    """

    tokens: jax.Array
    lengths: jax.Array
    sampling: Sampling


@struct.dataclass
class PrefillBatch:
    """One chunk of prompt for any of the slots, flat.

    Attributes:
      tokens: int32 `[T]`; slot s has rows query_start[s]:query_start[s+1], the rest is padding.
      query_start: int32 `[S+1]`.
      cached: int32 `[S]`, the slot's tokens that are in the cache already.
      page_table: int32 `[S, M]`.
    """

    tokens: jax.Array
    query_start: jax.Array
    cached: jax.Array
    page_table: jax.Array


@struct.dataclass
class DecodeBatch:
    """Which slots take a decode step.

    Attributes:
      active: bool `[S]`; other slots keep their state and write to the dump page.
      page_table: int32 `[S, M]`.
    """

    active: jax.Array
    page_table: jax.Array


@struct.dataclass
class Outputs:
    """What a step chose.

    Attributes:
      tokens: int32 `[S]`.
      logprobs: float32 `[S]`, log-probability of the token under the model itself: before
        temperature and filters. NaN where the model's logits are.
    """

    tokens: jax.Array
    logprobs: jax.Array


def new_state(
    requests: Sequence[SamplingParams],
    vocab_size: int,
    prompt_lens: Sequence[int] | None = None,
    end_ids: Sequence[int] = (),
) -> State:
    """The state of slots that have nothing cached yet; arguments as of `pack_sampling`."""
    shape = (len(requests),)
    return State(
        tokens=jnp.zeros(shape, jnp.int32),
        lengths=jnp.zeros(shape, jnp.int32),
        sampling=jax.tree.map(jnp.array, pack_sampling(requests, vocab_size, prompt_lens, end_ids)),
    )


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
    """Where the rows of a decode step sit: row s is slot s."""
    batch = jax.tree.map(jnp.asarray, batch)
    slots = state.tokens.shape[0]
    return Layout(
        query_start=jnp.arange(slots + 1, dtype=jnp.int32),
        kv_lens=jnp.where(batch.active, state.lengths + 1, 1),
        page_table=jnp.where(batch.active[:, None], batch.page_table, DUMP_PAGE),
        max_query=1,
    )


def prefill_logits(
    params: Params, cache: Cache, batch: PrefillBatch, *, config: ModelConfig
) -> tuple[Cache, jax.Array]:
    """Runs a chunk and returns the cache and the logits `[S, V]` of each slot's last row."""
    layout = prefill_layout(batch)
    cache, x = decoder(params, cache, batch.tokens, layout, config)
    last = jnp.maximum(batch.query_start[1:] - 1, 0)
    return cache, head(params, x[last], config)


def decode_logits(
    params: Params, cache: Cache, state: State, batch: DecodeBatch, *, config: ModelConfig
) -> tuple[Cache, jax.Array]:
    """Runs each active slot's newest token; returns the cache and logits `[S, V]`."""
    layout = decode_layout(state, batch)
    cache, x = decoder(params, cache, state.tokens, layout, config)
    return cache, head(params, x, config)


def prefill(
    params: Params, cache: Cache, state: State, batch: PrefillBatch, *, config: ModelConfig
) -> tuple[Cache, State, Outputs]:
    """Appends a chunk of prompt to each slot that has rows, and samples what follows it.

    After the chunk that ends a prompt, the sampled token is the reply's first; after an earlier
    one it is overwritten by the next chunk. Slots without rows keep their state. Any chunking
    gives the same logits.
    """
    cache, logits = prefill_logits(params, cache, batch, config=config)
    rows = batch.query_start[1:] - batch.query_start[:-1]
    lengths = batch.cached + rows
    outputs = _choose(logits, state.sampling, lengths, config)
    state = dataclasses.replace(
        state,
        tokens=jnp.where(rows > 0, outputs.tokens, state.tokens),
        lengths=jnp.where(rows > 0, lengths, state.lengths),
    )
    return cache, state, outputs


def decode(
    params: Params, cache: Cache, state: State, batch: DecodeBatch, *, config: ModelConfig
) -> tuple[Cache, State, Outputs]:
    """Appends each active slot's newest token to the cache and samples the next one."""
    cache, logits = decode_logits(params, cache, state, batch, config=config)
    lengths = state.lengths + 1
    outputs = _choose(logits, state.sampling, lengths, config)
    state = dataclasses.replace(
        state,
        tokens=jnp.where(batch.active, outputs.tokens, state.tokens),
        lengths=jnp.where(batch.active, lengths, state.lengths),
    )
    return cache, state, outputs


def score(
    params: Params,
    cache: Cache,
    state: State,
    batch: PrefillBatch,
    targets: jax.Array,
    *,
    config: ModelConfig,
) -> tuple[Cache, State, jax.Array]:
    """Appends a chunk as `prefill` does, and returns log-probabilities float32 `[T]`.

    Element t is the log-probability of `targets[t]` (int32 `[T]`) after row t. Nothing is sampled:
    the state's tokens stay what they were.
    """
    layout = prefill_layout(batch)
    cache, x = decoder(params, cache, batch.tokens, layout, config)
    logits = head(params, x, config)
    lengths = jnp.where(jnp.diff(layout.query_start) > 0, layout.kv_lens, state.lengths)
    state = dataclasses.replace(state, lengths=lengths)
    return cache, state, _logprobs(logits, targets)


def _choose(
    logits: jax.Array, sampling: Sampling, positions: jax.Array, config: ModelConfig
) -> Outputs:
    # Slots do not remember their tokens, so penalties have nothing to go by.
    history = jnp.zeros((logits.shape[0], 0), jnp.int32)
    choice = choose(logits, sampling, history, positions, config.kernels)
    return Outputs(tokens=choice.tokens, logprobs=choice.logprobs)


def _logprobs(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)
