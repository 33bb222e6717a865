"""Latent attention over pages by the compiled kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import StokerError
from ..layout import Layout
from .attention import KEYS, MAX_HEAD
from .library import load, why_unavailable
from .matmul import isa_number

_PAGES = (jnp.float32, jnp.bfloat16)


def latent_attention(
    q: jax.Array,
    latent: jax.Array,
    pages: jax.Array,
    layout: Layout,
    *,
    rank: int,
    scale: float,
    norm: tuple[jax.Array, float] | None = None,
    turn: tuple[jax.Array, jax.Array] | None = None,
    rounded: bool = False,
    isa: str = "best",
    threads: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Appends latent vectors to the pages, then attends causally over live pages.

    As `attention`, with one KV head whose keys are its values too; a row's bits depend on its query
    and the vectors it sees only. The kernel sums up the whole vectors: what is past `rank` is cut
    off, which costs a tenth of the sums with DeepSeek's widths.

    Args:
      q: `[T, N, W]`; float32, or bfloat16 (computed with as float32).
      latent: `[T, W]`.
      pages: float32 or bfloat16 `[P, Z, W]`, Z a multiple of 16; donate it, and it is updated in
        place.
      layout: where the rows sit. Padding rows write nothing and yield zeros.
      rank: how many of the W numbers are the value.
      scale: factor on the scores.
      norm: weight float32 `[rank]` and epsilon of the RMS norm that the first numbers of latent
        vectors go through before they are appended; None for none.
      turn: cosines and sines float32 `[T, dims/2]` of the rotary embedding that what is past `rank`
        goes through, of q and of latent vectors; None leaves it as it is.
      rounded: whether queries and softmax weights may be rounded to bfloat16 where pages are, which
        takes half the time where processors multiply pairs of such numbers (AVX-512 with BF16);
        elsewhere, and for odd widths, they stay as they are.
      isa: one of `library.ISAS`.
      threads: most threads to use; 0 for all that XLA has.

    Returns:
      Attention output `[T, N, rank]` in q's dtype, and the pages.

    Raises:
      StokerError: the kernels are not available, or shapes or types do not fit. A layout whose
        values are out of range is an error of the runtime when the call is executed.
    """
    if load() is None:
        raise StokerError(str(why_unavailable()))
    isa_index = isa_number(isa)
    weight, eps = norm if norm is not None else (jnp.zeros(0, jnp.float32), 1.0)
    if turn is None:
        turn = (jnp.zeros((q.shape[0], 0), jnp.float32),) * 2
    _check(q, latent, pages, layout, rank, weight, turn)
    call = jax.ffi.ffi_call(
        "stoker_latent_attention",
        [
            jax.ShapeDtypeStruct(q.shape, jnp.float32),
            jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        ],
        vmap_method="sequential",
        input_output_aliases={5: 1},
    )
    out, pages = call(
        q.astype(jnp.float32),
        latent.astype(jnp.float32),
        weight,
        *turn,
        pages,
        layout.query_start,
        layout.kv_lens,
        layout.page_table,
        rank=np.int64(rank),
        eps=np.float32(eps),
        scale=np.float32(scale),
        rounded=np.bool_(rounded),
        isa=np.int64(isa_index),
        threads=np.int64(threads),
    )
    return out[..., :rank].astype(q.dtype), pages


def _check(
    q: jax.Array,
    latent: jax.Array,
    pages: jax.Array,
    layout: Layout,
    rank: int,
    weight: jax.Array,
    turn: tuple[jax.Array, jax.Array],
) -> None:
    """Raises StokerError unless shapes and types fit each other."""
    if q.ndim != 3 or pages.ndim != 3 or layout.page_table.ndim != 2:
        raise StokerError(
            f"latent attention got q {list(q.shape)}, pages {list(pages.shape)} and table "
            f"{list(layout.page_table.shape)}; these need 3, 3 and 2 axes"
        )
    (T, N, W), (P, Z, _) = q.shape, pages.shape
    S = layout.page_table.shape[0]
    expected = {
        "latent": (latent.shape, (T, W)),
        "pages": (pages.shape, (P, Z, W)),
        "query_start": (layout.query_start.shape, (S + 1,)),
        "kv_lens": (layout.kv_lens.shape, (S,)),
        "norm": (weight.shape, (rank,) if weight.size else (0,)),
        "sines": (turn[1].shape, turn[0].shape),
        "cosines": (turn[0].shape, (T, min(turn[0].shape[-1], (W - rank) // 2))),
    }
    for name, (got, want) in expected.items():
        if tuple(got) != tuple(want):
            raise StokerError(
                f"latent attention got {name} of shape {list(got)}; it must be {list(want)}"
            )
    if N < 1 or P < 1 or not 0 < W <= MAX_HEAD or not 0 < rank <= W:
        raise StokerError(
            f"latent attention got {N} heads, {P} pages and {rank} values in vectors of {W}; it "
            f"needs some of each, and vectors of at most {MAX_HEAD}"
        )
    if Z < 1 or Z % KEYS:
        raise StokerError(
            f"latent attention got pages of {Z} tokens; the CPU kernels take multiples of {KEYS}"
        )
    if pages.dtype not in _PAGES:
        raise StokerError(
            f"latent attention got pages of {pages.dtype}; they must be float32 or bfloat16"
        )
    for name in ("query_start", "kv_lens", "page_table"):
        if getattr(layout, name).dtype != jnp.int32:
            raise StokerError(f"layout.{name} is {getattr(layout, name).dtype}; it must be int32")
