"""Paged grouped-query attention by the compiled kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import StokerError
from ..layout import Layout
from .library import load, why_unavailable
from .matmul import isa_number

#: Widest head that the kernels take, kMaxHead in kernels.h.
MAX_HEAD = 640
#: Neighbouring keys that the kernels take at once, kKeys in kernels.h.
KEYS = 16
_PAGES = (jnp.float32, jnp.bfloat16)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    layout: Layout,
    *,
    scale: float,
    turn: tuple[jax.Array, jax.Array] | None = None,
    sinks: jax.Array | None = None,
    window: int = 0,
    softcap: float = 0.0,
    rounded: bool = False,
    isa: str = "best",
    threads: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Appends this step's keys and values to the pages, then attends causally over live pages.

    The online softmax of FlashAttention (Dao et al. 2022), a round to each 256 positions. Sums
    are float32. A row's bits depend on its query and the keys it sees only: not on how a prompt
    was cut into chunks, the other slots, or the threads.

    Args:
      q: `[T, N, H]`; float32, or bfloat16 (computed with as float32).
      k: `[T, K, H]`.
      v: `[T, K, H]`.
      k_pages: float32 or bfloat16 `[P, K, H, Z]`, Z a multiple of 16; donate it, and it is updated
        in place.
      v_pages: `[P, K, Z, H]`, likewise.
      layout: where the rows sit. Padding rows write nothing and yield zeros.
      scale: factor on the scores, usually H ** -0.5.
      turn: cosines and sines float32 `[T, dims/2]` of the rotary embedding that q and k go through
        first; None leaves them as they are.
      sinks: float32 `[N]`, as of `xla.attention`; None for none.
      window: tokens that a row sees, itself included; 0 for all.
      softcap: scores become softcap * tanh(score / softcap); 0 for none.
      rounded: whether queries and softmax weights may be rounded to bfloat16 where pages are, which
        takes half the time where processors multiply pairs of such numbers (AVX-512 with BF16);
        elsewhere, and for odd widths, they stay as they are.
      isa: one of `library.ISAS`.
      threads: most threads to use; 0 for all that XLA has.

    Returns:
      Attention output `[T, N, H]` in q's dtype, and both page pools.

    Raises:
      StokerError: the kernels are not available, or shapes or types do not fit. A layout whose
        values are out of range is an error of the runtime when the call is executed.
    """
    if load() is None:
        raise StokerError(str(why_unavailable()))
    isa_index = isa_number(isa)
    if turn is None:
        turn = (jnp.zeros((q.shape[0], 0), jnp.float32),) * 2
    if sinks is None:
        sinks = jnp.zeros(0, jnp.float32)
    _check(q, k, v, k_pages, v_pages, layout, turn, sinks)
    shapes = [
        jax.ShapeDtypeStruct(q.shape, jnp.float32),
        jax.ShapeDtypeStruct(k_pages.shape, k_pages.dtype),
        jax.ShapeDtypeStruct(v_pages.shape, v_pages.dtype),
    ]
    call = jax.ffi.ffi_call(
        "stoker_attention",
        shapes,
        vmap_method="sequential",
        input_output_aliases={5: 1, 6: 2},
    )
    rows = (x.astype(jnp.float32) for x in (q, k, v))
    out, k_pages, v_pages = call(
        *rows,
        *turn,
        k_pages,
        v_pages,
        layout.query_start,
        layout.kv_lens,
        layout.page_table,
        sinks,
        window=np.int64(window),
        softcap=np.float32(softcap),
        scale=np.float32(scale),
        rounded=np.bool_(rounded),
        isa=np.int64(isa_index),
        threads=np.int64(threads),
    )
    return out.astype(q.dtype), k_pages, v_pages


def _check(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    layout: Layout,
    turn: tuple[jax.Array, jax.Array],
    sinks: jax.Array,
) -> None:
    """Raises StokerError unless shapes and types fit each other."""
    if q.ndim != 3 or k.ndim != 3 or k_pages.ndim != 4 or layout.page_table.ndim != 2:
        raise StokerError(
            f"attention got q {list(q.shape)}, k {list(k.shape)}, pages {list(k_pages.shape)} and "
            f"table {list(layout.page_table.shape)}; these need 3, 3, 4 and 2 axes"
        )
    T, N, H = q.shape
    K, S = k.shape[1], layout.page_table.shape[0]
    P, Z = k_pages.shape[0], k_pages.shape[-1]
    expected = {
        "k": (k.shape, (T, K, H)),
        "v": (v.shape, (T, K, H)),
        "k_pages": (k_pages.shape, (P, K, H, Z)),
        "v_pages": (v_pages.shape, (P, K, Z, H)),
        "query_start": (layout.query_start.shape, (S + 1,)),
        "kv_lens": (layout.kv_lens.shape, (S,)),
        "sines": (turn[1].shape, turn[0].shape),
        "sinks": (sinks.shape, (N,) if sinks.size else (0,)),
        "cosines": (turn[0].shape, (T, min(turn[0].shape[-1], H // 2))),
    }
    for name, (got, want) in expected.items():
        if tuple(got) != tuple(want):
            raise StokerError(f"attention got {name} of shape {list(got)}; it must be {list(want)}")
    if K == 0 or N % K or not 0 < H <= MAX_HEAD:
        raise StokerError(
            f"attention got {N} query heads, {K} KV heads of width {H}; query heads must be a "
            f"multiple of KV heads and the width at most {MAX_HEAD}"
        )
    if 0 in k_pages.shape:
        raise StokerError(f"attention got pages of shape {list(k_pages.shape)}; none may be empty")
    if Z % KEYS:
        raise StokerError(
            f"attention got pages of {Z} tokens; the CPU kernels take multiples of {KEYS}"
        )
    if k_pages.dtype not in _PAGES or v_pages.dtype != k_pages.dtype:
        raise StokerError(
            f"attention got pages of {k_pages.dtype} and {v_pages.dtype}; both must be float32 or "
            "both bfloat16"
        )
    if sinks.dtype != jnp.float32:
        raise StokerError(f"attention got sinks of {sinks.dtype}; they must be float32")
    for name in ("query_start", "kv_lens", "page_table"):
        if getattr(layout, name).dtype != jnp.int32:
            raise StokerError(f"layout.{name} is {getattr(layout, name).dtype}; it must be int32")
