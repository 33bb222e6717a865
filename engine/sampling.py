"""Sampling on the device: one token for each row, whatever each request asks for.

In this order: biases, penalties and bans (`models/ops/xla/edit.py`), temperature, top_k, top_p,
min_p, and one draw (`models/ops/xla/sample.py`). Log-probabilities are those of the model itself:
before all of these, so that they do not depend on how a token was chosen. Randomness depends on
(seed, position) alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from ..models import ops
from ..models.config import Kernels


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
