"""Paged attention over a flat token axis, in plain XLA: of grouped queries, and latent."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ..elementwise import softcap as soften
from ..layout import Layout
from ..partial import NOTHING
from ..quant_pages import Pages, narrow, store, widen

#: Cache positions that the reference attends to in one round of its loop.
BLOCK_TOKENS = 128
# Float32 stays float32, also where a platform multiplies something narrower by default.
_EXACT = jax.lax.Precision.HIGHEST


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    layout: Layout,
    *,
    scale: float,
    sinks: jax.Array | None = None,
    window: int = 0,
    softcap: float = 0.0,
    by_token: bool = True,
) -> tuple[jax.Array, Pages, Pages]:
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
      by_token: whether value pages are `[P, K, Z, H]`; else they are laid out as keys are.

    Returns:
      Attention output `[T, N, H]` in q's dtype, and both page pools.
    """
    out, _, k_pages, v_pages = partial_attention(
        *(q, k, v, k_pages, v_pages, layout),
        scale=scale,
        sinks=sinks,
        window=window,
        softcap=softcap,
        by_token=by_token,
    )
    return out.astype(q.dtype), k_pages, v_pages


def partial_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    layout: Layout,
    *,
    scale: float,
    sinks: jax.Array | None = None,
    window: int = 0,
    softcap: float = 0.0,
    share: jax.Array | int = 0,
    shares: int = 1,
    by_token: bool = True,
) -> tuple[jax.Array, jax.Array, Pages, Pages]:
    """`attention` over one of `shares` equal shares of each page's tokens.

    A page holds `shares * Z` tokens; this share's pages are the Z from `share * Z` on. Rows are
    written where they belong to these.

    Returns:
      Attention output float32 `[T, N, H]`; for each row and query head the logarithm of its summed
      exponentials, float32 `[T, N]`: `NOTHING`, or about that, where the row sees none of these
      tokens, and then the output means nothing; and both page pools.
    """
    _, K, H, Z = k_pages.shape
    page, offset = layout.places(q.shape[0], Z, share, shares)
    k_pages = store(k_pages, k, page, offset, token_axis=3)
    v_pages = store(v_pages, v, page, offset, token_axis=2 if by_token else 3)

    def read(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        S, pages = ids.shape
        keys, values = (jax.tree.map(lambda x: x[ids], pool) for pool in (k_pages, v_pages))
        turn = (0, 1, 3, 2, 4) if by_token else (0, 1, 4, 2, 3)
        keys = widen(keys, -2).transpose(0, 1, 4, 2, 3)
        values = widen(values, -1 if by_token else -2).transpose(turn)
        return keys.reshape(S, pages * Z, K, H), values.reshape(S, pages * Z, K, H)

    out, lse = _attend(
        *(q, read, (K, H), Z, layout, scale),
        sinks=sinks,
        window=window,
        softcap=softcap,
        share=share,
        shares=shares,
    )
    return out, lse, k_pages, v_pages


def latent_attention(
    q: jax.Array, latent: jax.Array, pages: jax.Array, layout: Layout, *, rank: int, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Appends latent vectors to the pages, then attends causally over live pages.

    Multi-head latent attention in its absorbed form (arXiv 2405.04434, section 2.1): all heads meet
    one key per token, whose first numbers are the token's value too.

    Args:
      q: `[T, N, W]`: a query in the latent space, then its rotated part.
      latent: `[T, W]`: the normed latent vector, then the rotated key.
      pages: `[P, Z, W]`, or wider, with zeros after W; donate it, and it is updated in place.
      layout: where the rows sit, as for `attention`.
      rank: R, how many of the W numbers are the value.
      scale: factor on the scores.

    Returns:
      Attention output `[T, N, R]` in q's dtype, still in the latent space, and the pages.
    """
    out, _, pages = partial_latent_attention(q, latent, pages, layout, rank=rank, scale=scale)
    return out.astype(q.dtype), pages


def partial_latent_attention(
    q: jax.Array,
    latent: jax.Array,
    pages: jax.Array,
    layout: Layout,
    *,
    rank: int,
    scale: float,
    share: jax.Array | int = 0,
    shares: int = 1,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`latent_attention` over one share, float32, logarithms of sums, and the pages.

    See `partial_attention`, which says more.
    """
    Z, held = pages.shape[1:]
    W = latent.shape[-1]
    page, offset = layout.places(q.shape[0], Z, share, shares)
    rows = jnp.pad(narrow(latent, pages.dtype), ((0, 0), (0, held - W)))
    pages = pages.at[page, offset].set(rows)

    def read(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        keys = pages[ids].reshape(ids.shape[0], -1, 1, held)[..., :W]
        return keys, keys[..., :rank]

    out, lse = _attend(q, read, (1, rank), Z, layout, scale, share=share, shares=shares)
    return out, lse, pages


def _attend(
    q: jax.Array,
    read: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    values_shape: tuple[int, int],
    Z: int,
    layout: Layout,
    scale: float,
    sinks: jax.Array | None = None,
    window: int = 0,
    softcap: float = 0.0,
    share: jax.Array | int = 0,
    shares: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Causal attention of `q [T, N, H]` over pages that hold this step's rows already.

    Args:
      q: queries.
      read: keys `[S, C, K, H]` and values `[S, C, K, V]` of the C tokens in pages `[S, C/Z]`.
      values_shape: K and V.
      Z: tokens of a page, or of this share of it.
      layout: where the rows sit.
      scale: as of `attention`, like the rest.
      sinks: likewise.
      window: likewise.
      softcap: likewise.
      share: as of `partial_attention`, like its results.
      shares: likewise.

    Returns:
      Output `[T, N, V]` and logarithms of sums `[T, N]`, NaN in rows past their pages.
    """
    T, N, H = q.shape
    K, V = values_shape
    S, M = layout.page_table.shape
    Q, G = layout.max_query, N // K
    whole, before = Z * shares, Z * share
    slot, position = layout.rows(T)
    start = layout.query_start[:-1]
    before_all = layout.kv_lens - jnp.diff(layout.query_start) - window
    row = jnp.minimum(start[:, None] + jnp.arange(Q), T - 1)
    queries = q[row].reshape(S, Q, K, G, H).astype(jnp.float32) * scale
    query_position = position[row]

    pages = max(BLOCK_TOKENS // Z, 1)
    table = jnp.pad(layout.page_table, ((0, 0), (0, -M % pages)))

    def block(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        peak, total, weighted = carry
        ids = jax.lax.dynamic_slice_in_dim(table, index * pages, pages, axis=1)
        keys, values = (part.astype(jnp.float32) for part in read(ids))
        at = jnp.arange(pages * Z)
        key_position = (index * pages + at // Z) * whole + before + at % Z
        # A weight of zero does not silence a NaN that an earlier owner left in the page.
        stale = key_position >= layout.kv_lens[:, None]
        if window:  # nor one that a later owner put there
            stale |= key_position <= before_all[:, None]
        values = jnp.where(stale[:, :, None, None], 0, values)
        scores = jnp.einsum("sqkgh,sckh->sqkgc", queries, keys, precision=_EXACT)
        scores = soften(scores, softcap)
        seen = key_position <= query_position[..., None]
        if window:
            seen &= key_position > query_position[..., None] - window
        scores = jnp.where(seen[:, :, None, None, :], scores, NOTHING)
        new_peak = jnp.maximum(peak, scores.max(-1))
        decay = jnp.exp(peak - new_peak)
        weights = jnp.exp(scores - new_peak[..., None])
        total = total * decay + weights.sum(-1)
        added = jnp.einsum("sqkgc,sckv->sqkgv", weights, values, precision=_EXACT)
        weighted = weighted * decay[..., None] + added
        return new_peak, total, weighted

    zeros = jnp.zeros((S, Q, K, G), jnp.float32)
    rounds = (jnp.max(layout.kv_lens) + pages * whole - 1) // (pages * whole)
    if sinks is None:
        peak, total = zeros + NOTHING, zeros
    else:
        peak, total = zeros + sinks.reshape(K, G), zeros + 1
    first = (peak, total, jnp.zeros((S, Q, K, G, V), jnp.float32))
    peak, total, weighted = jax.lax.fori_loop(0, rounds, block, first)
    rank = jnp.clip(jnp.arange(T) - start[slot], 0, Q - 1)
    peak, total = (x[slot, rank].reshape(T, N) for x in (peak, total))
    total = jnp.where((position >= M * whole)[:, None], jnp.nan, total)
    total = jnp.maximum(total, 1e-30)
    weighted = weighted[slot, rank].reshape(T, N, V)
    return weighted / total[..., None], peak + jnp.log(total)
