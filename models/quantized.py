"""Quantised arrays: small integer codes times group scales plus group minima."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

#: Bits a stored code may take: whole bytes, or two codes to a byte.
CODE_BITS = (4, 8)
#: What the codes of four-bit floats stand for: a sign, two bits of exponent and one of mantissa
#: (Open Compute Project, Microscaling Formats 1.0, table 5).
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class LogicalArray:
    """What a matrix kept in several leaves says of itself, like an array."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape `[..., R, C]`."""
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        """The number of logical axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of logical elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that one read of the whole array moves."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))


@struct.dataclass
class QuantArray(LogicalArray):
    """A matrix `[R, C]` of quantised weights, rows being outputs and columns inputs.

    Element `(r, c)` of group `g = c // group` is::

        (code[r, c] - zero_point) * scale[r, g] + minimum[r, g]

    computed in float32. With `levels`, `levels[code]` takes the place of the code. With
    `super_scale`, scales are themselves small numbers times a factor that
    `C // super_scale.shape[-1]` columns share (the k-quants of GGUF); likewise for minima. Leading
    axes (experts) may precede R in every leaf.

    Attributes:
      codes: int8, float8_e4m3fn or float8_e5m2 `[R, C]` where `bits == 8`; uint8 `[R, C/2]` where
        `bits == 4`. A group of n codes takes n/2 bytes there: byte j holds code j in its low and
        code j + n/2 in its high half. Rows may end with bytes that stand for nothing (see `ready`).
      scale: `[R, C/group]`, any float type (float8_e8m0fnu: powers of two); integer or
        float8_e4m3fn where `super_scale` is given.
      minimum: like `scale`, or None for a symmetric format.
      super_scale: float16 or float32 `[R, C/columns]`, or None.
      super_minimum: like `super_scale`, or None.
      bits: width of a stored code, one of `CODE_BITS`.
      zero_point: what is subtracted from a stored code.
      group: columns that share a scale.
      levels: what each of the 16 codes of `bits == 4` stands for, for example `E2M1`; empty where
        codes stand for themselves.
    """

    codes: jax.Array
    scale: jax.Array
    minimum: jax.Array | None = None
    super_scale: jax.Array | None = None
    super_minimum: jax.Array | None = None
    bits: int = struct.field(pytree_node=False, default=8)
    zero_point: int = struct.field(pytree_node=False, default=0)
    group: int = struct.field(pytree_node=False, default=32)
    levels: tuple[float, ...] = struct.field(pytree_node=False, default=())

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape `[..., R, C]`."""
        return (*self.codes.shape[:-1], self.scale.shape[-1] * self.group)

    @property
    def row_bytes(self) -> int:
        """Bytes of codes in a row, without those that stand for nothing."""
        return self.shape[-1] * self.bits // 8

    def __getitem__(self, rows: jax.Array) -> QuantArray:
        """The given rows of a matrix, still quantised; `rows` is an integer array."""
        return jax.tree.map(lambda leaf: leaf[rows], self)


Weight = jax.Array | QuantArray


def _grouped(values: jax.Array, factor: jax.Array | None) -> jax.Array:
    """Group scales or minima in float32, `[..., C/group]`."""
    values = _float32(values)
    if factor is None:
        return values
    repeats = values.shape[-1] // factor.shape[-1]
    return values * jnp.repeat(_float32(factor), repeats, axis=-1)


def _float32(values: jax.Array) -> jax.Array:
    """Integers and floats, or float16 whose bits are kept as int16 (see `ready`)."""
    if values.dtype == jnp.int16:
        values = jax.lax.bitcast_convert_type(values, jnp.float16)
    return values.astype(jnp.float32)


def dequantize(array: QuantArray, dtype: jnp.dtype | type = jnp.float32) -> jax.Array:
    """The dense array `[..., R, C]`; computed in float32, then cast to `dtype`."""
    grouped = (*array.scale.shape, -1)
    codes = array.codes[..., : array.row_bytes].reshape(grouped)
    if array.bits == 4:
        codes = jnp.concatenate([codes & 15, codes >> 4], axis=-1)
    if array.levels:
        values = jnp.asarray(array.levels, jnp.float32).at[codes].get(mode="promise_in_bounds")
    else:
        values = codes.astype(jnp.float32)
    scale = _grouped(array.scale, array.super_scale)[..., None]
    values = (values - array.zero_point) * scale
    if array.minimum is not None:
        values = values + _grouped(array.minimum, array.super_minimum)[..., None]
    return values.reshape(array.shape).astype(dtype)


def ready(weight: QuantArray) -> QuantArray:
    """`weight`, of arrays of NumPy or of JAX, as TPU kernels load it: the same numbers.

    Scales of float16 become int16 of the same bits. Rows of codes are filled up with zeros to whole
    registers: XLA would lay others out by columns, and copy the codes for each product.
    """

    def bits(leaf: Any) -> Any:
        return leaf.view(jnp.int16) if leaf.dtype == jnp.float16 else leaf

    weight = jax.tree.map(bits, weight)
    missing = ready_bytes(weight.codes.shape[-1]) - weight.codes.shape[-1]
    if not missing:
        return weight
    library: Any = np if isinstance(weight.codes, np.ndarray) else jnp
    edges = [(0, 0)] * (weight.codes.ndim - 1) + [(0, missing)]
    return dataclasses.replace(weight, codes=library.pad(weight.codes, edges))


def ready_bytes(row_bytes: int) -> int:
    """Bytes of a row of codes once `ready`: whole registers of 128."""
    return -(-row_bytes // 128) * 128


def densify(weight: Weight, dtype: jnp.dtype | type = jnp.float32) -> jax.Array:
    """`weight` as a dense array of `dtype`, quantised or not."""
    if isinstance(weight, QuantArray):
        return dequantize(weight, dtype)
    return weight.astype(dtype)
