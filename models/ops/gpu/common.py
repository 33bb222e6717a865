"""What the GPU kernels share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..partial import NOTHING

#: Float32 stays float32 on the tensor cores.
EXACT = jax.lax.Precision.HIGHEST


def dot(a: jax.Array, b: jax.Array, work: Any, precision: Any) -> jax.Array:
    """`a [R, C]` times `b [C, W]`, both made `work`; sums in float32."""
    return jax.lax.dot_general(
        a.astype(work),
        b.astype(work),
        (((1,), (0,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def zero(ref: Any) -> int | float:
    """What fills the lanes of a load that are not there: Triton casts no integer to a float8."""
    return 0 if jnp.issubdtype(ref.dtype, jnp.integer) else 0.0


def fold(
    score: jax.Array, seen: jax.Array, peak: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Takes scores `[R, C]` into the softmax of R rows; those not `seen` count for nothing.

    Returns:
      Weights `[R, C]`, and `[R]` each: what earlier sums shrink by, the new peak, the new total.
    """
    score = jnp.where(seen, score, NOTHING)
    new_peak = jnp.maximum(peak, score.max(axis=1))
    decay = jnp.exp(peak - new_peak)
    weights = jnp.where(seen, jnp.exp(score - new_peak[:, None]), 0)
    return weights, decay, new_peak, total * decay + weights.sum(axis=1)


def joined(
    sums: jax.Array, peak: jax.Array, total: jax.Array, sinks: jax.Array | None, G: int
) -> tuple[jax.Array, jax.Array]:
    """The output float32 `[W, K, R, H]` of all splits' sums `[splits, W, K, R, H]`.

    And logarithms of summed exponentials, `[W, K, R, 1]`.
    """
    best = peak.max(axis=0)
    extra: jax.Array | float = 0.0
    if sinks is not None:
        K, R = best.shape[1:]
        sink = jnp.tile(sinks.astype(jnp.float32).reshape(K, G), (1, R // G))
        best = jnp.maximum(best, sink)
        extra = jnp.exp(sink - best)
    share = jnp.exp(peak - best)
    whole = jnp.maximum((total * share).sum(axis=0) + extra, 1e-30)
    out = (sums * share[..., None]).sum(axis=0) / whole[..., None]
    return out, (best + jnp.log(whole))[..., None]
