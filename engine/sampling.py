"""Sampling on the device: one token for each row, whatever each request asks for.

In this order: biases, penalties and bans (`models/ops/xla/edit.py`), temperature, top_k, top_p,
min_p, and one draw (`models/ops/xla/sample.py`). Log-probabilities are those of the model itself:
before all of these, so that they do not depend on how a token was chosen. Randomness depends on
(seed, position) alone.
"""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import struct

from ..models import ops
from ..models.config import Kernels, ModelConfig
from ..models.transformer import whole_vocabulary
from ..sharding.collectives import dealt, joined, padded_rows

Tree = TypeVar("Tree")


@struct.dataclass
class Outputs:
    """What a step chose, for each of its rows.

    Attributes:
      tokens: int32 `[B]`, always from 0 to V - 1.
      logprobs: float32 `[B]`, log-probability of the token under the model itself: before biases,
        penalties, temperature and filters. NaN or infinite where `finite` is false.
      top_ids: int32 `[B, top]`, the most likely tokens under the model, most likely first, of equal
        ones the smaller id; where the row wants none, or V is less, -1.
      top_logprobs: float32 `[B, top]`, theirs, and -inf beside ids of -1.
      finite: bool `[B]`; false where the row's logits hold NaN or +inf, or nothing but -inf: such a
        token means nothing.
    """

    tokens: jax.Array
    logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array
    finite: jax.Array


def choose(
    logits: jax.Array,
    sampling: ops.Sampling,
    history: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    kernels: Kernels,
    top: int = 0,
) -> Outputs:
    """One token for each row of `logits`.

    A row's result depends on its own arguments only: not on B or its neighbours. What no row asks
    for is not computed.

    Args:
      logits: float32 `[B, V]`, of the model.
      sampling: S rows.
      history: int32 `[S, C]`; the first positions[b] of row slots[b] are the tokens before the one
        that is chosen, prompt and reply; the rest is not read.
      slots: int32 `[B]`, the row of `sampling` and `history` that each row of logits takes; from
        S on, which is padding, the last.
      positions: int32 `[B]`, the position that each chosen token will take: with the seed, it
        alone decides the draw.
      kernels: who does the arithmetic.
      top: alternatives to return for rows that want them; static.
    """
    uniform = ops.uniforms(sampling.key.at[slots].get(mode="clip"), positions)
    tokens, total = ops.sample(logits, sampling, history, slots, positions, uniform, kernels)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    wants_top = sampling.wants_top.at[slots].get(mode="clip")
    top_logits, top_ids = ops.largest(logits, wants_top, top, kernels)
    return Outputs(
        tokens=tokens,
        logprobs=chosen - total,
        top_ids=top_ids,
        top_logprobs=top_logits - total[:, None],
        finite=jnp.isfinite(total),
    )


def choose_split(
    logits: jax.Array,
    sampling: ops.Sampling,
    history: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    config: ModelConfig,
    top: int = 0,
) -> Outputs:
    """`choose`, where each device of a mesh may have the logits of some tokens only.

    One all-to-all gives each device all logits of some rows; it chooses for these as one device
    would, so that a row's token does not depend on the mesh; and one all-gather of a few numbers a
    row tells the others.

    Args:
      logits: float32 `[B, V/n]`, of `head`; the rest is as of `choose`.
      sampling: S rows.
      history: int32 `[S, C]`.
      slots: int32 `[B]`.
      positions: int32 `[B]`.
      config: the architecture; its `split` says how the vocabulary is divided.
      top: alternatives.
    """
    vocab = config.split.axes("vocab")
    if not vocab:
        return choose(logits, sampling, history, slots, positions, config.kernels, top)
    parts = config.split.size(vocab)
    own_slots = dealt(padded_rows(slots, parts, history.shape[0]), parts, vocab)
    own_positions = dealt(padded_rows(positions, parts), parts, vocab)
    rows = whole_vocabulary(logits, config)
    own = choose(rows, sampling, history, own_slots, own_positions, config.kernels, top)
    return gather_rows(own, logits.shape[0], vocab)


def gather_rows(own: Tree, rows: int, axes: tuple[str, ...]) -> Tree:
    """What each part found for its rows, for all `rows` on all parts: one all-gather.

    Leaves are float32, int32 or bool, `[B/n]` or `[B/n, k]`.
    """
    leaves, structure = jax.tree.flatten(own)
    words = [_words(leaf) for leaf in leaves]
    table = joined(jnp.concatenate(words, axis=1), axes)[:rows]
    found, at = [], 0
    for leaf, word in zip(leaves, words, strict=True):
        part = table[:, at : at + word.shape[1]]
        at += word.shape[1]
        part = part != 0 if leaf.dtype == bool else _as_type(part, leaf.dtype)
        found.append(part.reshape(rows, *leaf.shape[1:]))
    return jax.tree.unflatten(structure, found)


def _words(leaf: jax.Array) -> jax.Array:
    """int32 `[B, k]` of the same bits."""
    flat = leaf.reshape(leaf.shape[0], -1)
    return flat.astype(jnp.int32) if flat.dtype == bool else _as_type(flat, jnp.dtype("int32"))


def _as_type(words: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return jax.lax.bitcast_convert_type(words, dtype)
