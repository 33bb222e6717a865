"""Pages of a cache that keeps keys and values as small integers with a scale to each row."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct

#: Largest code; -128 is left out, so that codes are symmetric.
_MOST = 127


@struct.dataclass
class QuantPages:
    """A pool of int8 pages. The row of a token and KV head is `codes * scale`.

    Attributes:
      codes: int8, with the shape that plain pages have: keys `[P, K, H, Z]`, values `[P, K, Z, H]`.
      scale: float32 `[P, K, Z]`.
    """

    codes: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the codes."""
        return self.codes.shape

    @property
    def dtype(self) -> jnp.dtype:
        """The type of the codes."""
        return self.codes.dtype


#: What one side of a layer's cache is kept in: floats (also float8_e4m3fn), or codes with scales.
Pages = jax.Array | QuantPages


def quantize_rows(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes int8 `[..., H]` and scales float32 `[...]` of `rows [..., H]`.

    The scale is the row's largest magnitude over 127, so no code is clipped and the error is at
    most half a scale. A row of zeros has scale 0; one with a NaN gets scale NaN.
    """
    wide = rows.astype(jnp.float32)
    scale = jnp.abs(wide).max(axis=-1) / _MOST
    inverse = jnp.where(scale > 0, 1 / jnp.where(scale > 0, scale, 1), 0)
    codes = jnp.round(wide * inverse[..., None])
    return jnp.clip(codes, -_MOST, _MOST).astype(jnp.int8), scale


def tpu_value_shape(page_tokens: int, head_dim: int) -> tuple[int, int]:
    """The last two axes of value pages for the TPU kernels.

    Memory is tiled by 128 lanes: a narrower last axis is padded to them, so widths that do not fill
    them go beside tokens, which do.
    """
    Z, H = page_tokens, head_dim
    return (Z, H) if tpu_values_by_token(H) else (H, Z)


def tpu_values_by_token(head_dim: int) -> bool:
    """Whether the TPU kernels want values as `[P, K, Z, H]`, not laid out as keys are."""
    return head_dim % 128 == 0


def pack_pages(arrays: Sequence[jax.Array]) -> tuple[Pages, Pages]:
    """Keys and values of a layer's arrays: two of floats, or each codes and scales, in turn."""
    if len(arrays) == 2:
        return arrays[0], arrays[1]
    return QuantPages(*arrays[:2]), QuantPages(*arrays[2:])


def narrow(rows: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`rows` in a type of pages; a float8 takes the nearest number that it has, never NaN."""
    if jnp.dtype(dtype).itemsize == 1:
        most = float(jnp.finfo(dtype).max)
        rows = jnp.clip(rows, -most, most)
    return rows.astype(dtype)


def widen(pages: Pages, axis: int) -> jax.Array:
    """The numbers that pages stand for, float32; `axis` is the one of H."""
    if isinstance(pages, QuantPages):
        return pages.codes.astype(jnp.float32) * jnp.expand_dims(pages.scale, axis)
    return pages.astype(jnp.float32)


def store(
    pages: Pages, rows: jax.Array, page: jax.Array, offset: jax.Array, token_axis: int
) -> Pages:
    """`rows [T, K, H]` written to their places, in place where `pages` is donated, by XLA.

    Args:
      pages: `[P, K, H, Z]` or `[P, K, Z, H]`.
      rows: floats.
      page: int32 `[T]`.
      offset: int32 `[T]`, the token of the page.
      token_axis: the axis of Z, 3 or 2.
    """

    def put(array: jax.Array, values: jax.Array) -> jax.Array:
        places = array.at[page, :, offset] if token_axis == 2 else array.at[page, :, :, offset]
        return places.set(values)

    if not isinstance(pages, QuantPages):
        return put(pages, narrow(rows, pages.dtype))
    codes, scale = quantize_rows(rows)
    return QuantPages(put(pages.codes, codes), pages.scale.at[page, :, offset].set(scale))
