"""Paged grouped-query attention by the compiled kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import StokerError
from ..layout import Layout
from ..quant_pages import Pages, QuantPages, pack_pages
from .library import load, why_unavailable
from .matmul import isa_number

#: Widest head that the kernels take, kMaxHead in kernels.h.
MAX_HEAD = 640
#: Neighbouring keys that the kernels take at once, kKeys in kernels.h.
KEYS = 16
_PAGES = (jnp.float32, jnp.bfloat16, jnp.int8)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
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
) -> tuple[jax.Array, Pages, Pages]:
    """Appends this step's keys and values to the pages, then attends causally over live pages.

    The online softmax of FlashAttention (Dao et al. 2022), a round to each 256 positions. Sums
    are float32. A row's bits depend on its query and the keys it sees only: not on how a prompt
    was cut into chunks, the other slots, or the threads.

    Args:
      q: `[T, N, H]`; float32, or bfloat16 (computed with as float32).
      k: `[T, K, H]`.
      v: `[T, K, H]`.
      k_pages: float32 or bfloat16 `[P, K, H, Z]`, or `QuantPages` of such codes; Z is a multiple
        of 16. Donate it, and it is updated in place.
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
    out, _, k_pages, v_pages = _call(
        *(q, k, v, k_pages, v_pages, layout),
        turn=turn,
        sinks=sinks,
        scale=scale,
        window=window,
        softcap=softcap,
        rounded=rounded,
        isa=isa,
        threads=threads,
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
    share: jax.Array | int,
    shares: int,
    scale: float,
    turn: tuple[jax.Array, jax.Array] | None = None,
    window: int = 0,
    softcap: float = 0.0,
    rounded: bool = False,
    isa: str = "best",
    threads: int = 0,
) -> tuple[jax.Array, jax.Array, Pages, Pages]:
    """`attention` over one of `shares` shares of each page's tokens; as `xla.partial_attention`.

    Further arguments and errors are those of `attention`.
    """
    return _call(
        *(q, k, v, k_pages, v_pages, layout),
        turn=turn,
        sinks=None,
        scale=scale,
        window=window,
        softcap=softcap,
        share=share,
        shares=shares,
        rounded=rounded,
        isa=isa,
        threads=threads,
    )


def _call(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    layout: Layout,
    *,
    turn: tuple[jax.Array, jax.Array] | None,
    sinks: jax.Array | None,
    scale: float,
    window: int,
    softcap: float,
    rounded: bool,
    isa: str,
    threads: int,
    share: jax.Array | int = 0,
    shares: int = 1,
) -> tuple[jax.Array, jax.Array, Pages, Pages]:
    """Output float32, logarithms of sums (of one share: of no rows), and both page pools."""
    if load() is None:
        raise StokerError(str(why_unavailable()))
    isa_index = isa_number(isa)
    if turn is None:
        turn = (jnp.zeros((q.shape[0], 0), jnp.float32),) * 2
    if sinks is None:
        sinks = jnp.zeros(0, jnp.float32)
    _check(q, k, v, k_pages, v_pages, layout, turn, sinks)
    part, sums_shape = share_arguments(share, shares, q)
    (k_array, *k_scales), (v_array, *v_scales) = map(jax.tree.leaves, (k_pages, v_pages))
    scales = [*k_scales, *v_scales]
    kept = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k_array, v_array, *scales)]
    call = jax.ffi.ffi_call(
        "stoker_attention",
        [jax.ShapeDtypeStruct(q.shape, jnp.float32), sums_shape, *kept],
        vmap_method="sequential",
        input_output_aliases={5: 2, 6: 3} | {12 + i: 4 + i for i in range(len(scales))},
    )
    rows = (x.astype(jnp.float32) for x in (q, k, v))
    out, lse, k_array, v_array, *scales = call(
        *rows,
        *turn,
        k_array,
        v_array,
        layout.query_start,
        layout.kv_lens,
        layout.page_table,
        sinks,
        part,
        *scales,
        window=np.int64(window),
        softcap=np.float32(softcap),
        scale=np.float32(scale),
        shares=np.int64(shares),
        rounded=np.bool_(rounded),
        isa=np.int64(isa_index),
        threads=np.int64(threads),
    )
    return out, lse, *pack_pages((k_array, *scales[:1], v_array, *scales[1:]))


def share_arguments(
    share: jax.Array | int, shares: int, q: jax.Array
) -> tuple[jax.Array, jax.ShapeDtypeStruct]:
    """What the kernels are told of a share, and their result of logarithms; of one, nothing."""
    if shares == 1:
        return jnp.zeros(0, jnp.int32), jax.ShapeDtypeStruct((0, 0), jnp.float32)
    part = jnp.asarray(share, jnp.int32).reshape(1)
    return part, jax.ShapeDtypeStruct(q.shape[:2], jnp.float32)


def _check(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    layout: Layout,
    turn: tuple[jax.Array, jax.Array],
    sinks: jax.Array,
) -> None:
    """Raises StokerError unless shapes and types fit each other."""
    if q.ndim != 3 or k.ndim != 3 or len(k_pages.shape) != 4 or layout.page_table.ndim != 2:
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
            f"attention got pages of {k_pages.dtype} and {v_pages.dtype}; both must be float32, "
            "bfloat16 or int8"
        )
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if isinstance(pages, QuantPages) != (pages.dtype == jnp.int8):
            scaled = "with" if isinstance(pages, QuantPages) else "without"
            raise StokerError(
                f"attention got {name} of {pages.dtype} {scaled} scales; int8 pages are "
                "QuantPages, and no others"
            )
        if isinstance(pages, QuantPages) and (
            pages.scale.shape != (P, K, Z) or pages.scale.dtype != jnp.float32
        ):
            raise StokerError(
                f"attention got scales of {name} that are {pages.scale.dtype} "
                f"{list(pages.scale.shape)}; they must be float32 {[P, K, Z]}"
            )
    if sinks.dtype != jnp.float32:
        raise StokerError(f"attention got sinks of {sinks.dtype}; they must be float32")
    for name in ("query_start", "kv_lens", "page_table"):
        if getattr(layout, name).dtype != jnp.int32:
            raise StokerError(f"layout.{name} is {getattr(layout, name).dtype}; it must be int32")
