"""Sampling on the device: one token for each row, whatever each request asks for.

In this order: biases, penalties and bans (`logit_edits`), temperature, top_k, top_p, min_p, and
one draw (`models/ops/xla/sample.py`). Log-probabilities are those of the model itself: before all
of these, so that they do not depend on how a token was chosen. Randomness depends on (seed,
position) alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ..models import ops
from ..models.config import Kernels
from .logit_edits import edit_logits, wants_edits
from .sampling_rows import Sampling, idle_sampling, pack_sampling

__all__ = ["Choice", "Sampling", "choose", "idle_sampling", "pack_sampling", "uniforms"]


@struct.dataclass
class Choice:
    """The tokens that were chosen, one for each row.

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
    sampling: Sampling,
    history: jax.Array,
    positions: jax.Array,
    kernels: Kernels,
    top: int = 0,
) -> Choice:
    """One token for each row of `logits`.

    A row's result depends on its own arguments only: not on B or its neighbours. What no row asks
    for is not computed.

    Args:
      logits: float32 `[B, V]`, of the model.
      sampling: B rows.
      history: int32 `[B, C]`; the first positions[b] of row b are the tokens before the one that is
        chosen, prompt and reply; the rest is not read.
      positions: int32 `[B]`, the position that each chosen token will take: with the seed, it
        alone decides the draw.
      kernels: who does the arithmetic.
      top: alternatives to return for rows that want them; static.
    """

    def draw(values: jax.Array) -> tuple[jax.Array, jax.Array]:
        return ops.sample(
            values,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            uniform,
            kernels,
        )

    def edit() -> jax.Array:
        return edit_logits(logits, sampling, history, positions)

    uniform = jax.lax.cond(
        (sampling.temperature > 0).any(),
        lambda: uniforms(sampling.key, positions),
        lambda: jnp.zeros(positions.shape),
    )
    edited = wants_edits(sampling, positions)
    if kernels.platform == "cpu":
        # A conditional that returned unedited logits would copy them, which takes longer than all.
        tokens, total = jax.lax.cond(
            edited,
            lambda: (draw(edit())[0], ops.logsumexp(logits, kernels)),
            lambda: draw(logits),
        )
    else:
        # The reference takes longer to compile than to copy.
        tokens, _ = draw(jax.lax.cond(edited, edit, lambda: logits))
        total = ops.logsumexp(logits, kernels)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    top_ids, top_logits = _alternatives(logits, sampling.wants_top, top, kernels)
    return Choice(
        tokens=tokens,
        logprobs=chosen - total,
        top_ids=top_ids,
        top_logprobs=top_logits - total[:, None],
        finite=jnp.isfinite(total),
    )


def _alternatives(
    logits: jax.Array, wanted: jax.Array, top: int, kernels: Kernels
) -> tuple[jax.Array, jax.Array]:
    """Ids and logits `[B, top]` of the largest logits, where wanted `[B]`."""
    shape = (logits.shape[0], top)
    nothing = jnp.full(shape, -1, jnp.int32), jnp.full(shape, -jnp.inf)
    if top == 0:
        return nothing

    def find() -> tuple[jax.Array, jax.Array]:
        values, ids = ops.largest(logits, wanted, top, kernels)
        return jnp.where(wanted[:, None], ids, -1), jnp.where(wanted[:, None], values, -jnp.inf)

    return jax.lax.cond(wanted.any(), find, lambda: nothing)


def uniforms(keys: jax.Array, positions: jax.Array) -> jax.Array:
    """A number in [0, 1), of 24 random bits, for each key `[B, 2]` and position `[B]`."""

    def one(key: jax.Array, position: jax.Array) -> jax.Array:
        stream = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position)
        return jax.random.bits(stream)

    bits = jax.vmap(one)(keys, positions) >> 8
    return bits.astype(jnp.float32) * np.float32(2**-24)
