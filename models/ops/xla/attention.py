"""Paged grouped-query attention over a flat token axis, in plain XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..elementwise import softcap as soften
from ..layout import DUMP_PAGE, Layout

#: Cache positions that the reference attends to in one round of its loop.
BLOCK_TOKENS = 128
_MASKED = -1e30
# Float32 stays float32, also where a platform multiplies something narrower by default.
_EXACT = jax.lax.Precision.HIGHEST


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    layout: Layout,
    *,
    scale: float,
    sinks: jax.Array | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Appends this step's keys and values to the pages, then attends causally over live pages.

    The online softmax of FlashAttention (Dao et al. 2022), in a loop whose length follows the
    longest live context. Writing first and reading the written buffer is what keeps XLA from
    copying donated pages.

    Args:
      q: `[T, N, H]`, rotated.
      k: `[T, K, H]`, rotated.
      v: `[T, K, H]`.
      k_pages: `[P, K, H, Z]`; donate it, and it is updated in place.
      v_pages: `[P, K, Z, H]`, likewise.
      layout: where the rows sit. A row past the M * Z tokens of its pages writes nothing, and its
        output is NaN.
      scale: factor on the scores, usually H ** -0.5.
      sinks: float32 `[N]`, one more score for each query head, which takes its share of the
        softmax and has no value (GPT-OSS; Xiao et al. 2023 on why it helps); None for none.
      window: tokens that a row sees, itself included; 0 for all.
      softcap: scores become softcap * tanh(score / softcap); 0 for none.

    Returns:
      Attention output `[T, N, H]` in q's dtype, and both page pools.
    """
    T, N, H = q.shape
    K, Z = v_pages.shape[1:3]
    S, M = layout.page_table.shape
    Q, G = layout.max_query, N // K
    slot, position = layout.rows(T)

    full = position >= M * Z
    live = (position >= 0) & ~full
    page = jnp.where(live, layout.page_table[slot, jnp.clip(position // Z, 0, M - 1)], DUMP_PAGE)
    offset = jnp.where(live, position % Z, 0)
    k_pages = k_pages.at[page, :, :, offset].set(k.astype(k_pages.dtype))
    v_pages = v_pages.at[page, :, offset].set(v.astype(v_pages.dtype))

    start = layout.query_start[:-1]
    row = jnp.minimum(start[:, None] + jnp.arange(Q), T - 1)
    queries = q[row].reshape(S, Q, K, G, H).astype(jnp.float32) * scale
    query_position = position[row]

    pages = max(BLOCK_TOKENS // Z, 1)
    table = jnp.pad(layout.page_table, ((0, 0), (0, -M % pages)))

    def block(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        peak, total, weighted = carry
        ids = jax.lax.dynamic_slice_in_dim(table, index * pages, pages, axis=1)
        keys = k_pages[ids].transpose(0, 1, 4, 2, 3).reshape(S, pages * Z, K, H)
        values = v_pages[ids].swapaxes(2, 3).reshape(S, pages * Z, K, H).astype(jnp.float32)
        key_position = index * pages * Z + jnp.arange(pages * Z)
        # A weight of zero does not silence a NaN that an earlier owner left in the page.
        stale = key_position >= layout.kv_lens[:, None]
        values = jnp.where(stale[:, :, None, None], 0, values)
        scores = jnp.einsum(
            "sqkgh,sckh->sqkgc", queries, keys.astype(jnp.float32), precision=_EXACT
        )
        scores = soften(scores, softcap)
        seen = key_position <= query_position[..., None]
        if window:
            seen &= key_position > query_position[..., None] - window
        scores = jnp.where(seen[:, :, None, None, :], scores, _MASKED)
        new_peak = jnp.maximum(peak, scores.max(-1))
        decay = jnp.exp(peak - new_peak)
        weights = jnp.exp(scores - new_peak[..., None])
        total = total * decay + weights.sum(-1)
        added = jnp.einsum("sqkgc,sckh->sqkgh", weights, values, precision=_EXACT)
        weighted = weighted * decay[..., None] + added
        return new_peak, total, weighted

    zeros = jnp.zeros((S, Q, K, G), jnp.float32)
    rounds = (jnp.max(layout.kv_lens) + pages * Z - 1) // (pages * Z)
    if sinks is None:
        peak, total = zeros + _MASKED, zeros
    else:
        peak, total = zeros + sinks.reshape(K, G), zeros + 1
    first = (peak, total, jnp.zeros((S, Q, K, G, H), jnp.float32))
    _, total, weighted = jax.lax.fori_loop(0, rounds, block, first)
    result = weighted / jnp.maximum(total, 1e-30)[..., None]
    rank = jnp.clip(jnp.arange(T) - start[slot], 0, Q - 1)
    out = jnp.where(full[:, None, None], jnp.nan, result[slot, rank].reshape(T, N, H))
    return out.astype(q.dtype), k_pages, v_pages
