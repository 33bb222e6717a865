"""Quantised weights in the interleaved layout that the CPU kernels stream."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ...errors import StokerError
from ...host_arrays import Empty, aligned_empty
from ...quantized import LogicalArray, QuantArray

#: Rows (outputs) of a tile, kTile in kernels.h.
TILE = 16
#: Bytes of codes packed at a time.
SLICE_BYTES = 1 << 20
#: Most columns that share an activation scale: as in the formats of llama.cpp.
MAX_BLOCK = 32


@struct.dataclass
class PackedArray(LogicalArray):
    """A matrix `[R, C]` with the values of the `QuantArray` it was packed from, 16 rows to a tile.

    A tile's codes follow each other four columns at a time: 64 bytes are 16 rows of 4 columns, one
    512-bit register. With 4-bit codes a byte holds a column of a block's first half in its low
    nibble, and the column half a block later in its high nibble. Codes are unsigned: signed ones
    are stored plus 128, and `zero_point` with them. Leading axes may precede in every leaf.

    Attributes:
      payload: uint8 `[R/16, C * bits / 32, 64]`.
      scale: `[R/16, C/group, 16]`, float16, bfloat16 or float32; int8 or uint8 with `super_scale`.
      minimum: like `scale`, or None.
      super_scale: factor of a run of scales, `[R/16, n, 16]`, or None.
      super_minimum: likewise for minima.
      bits: 4 or 8.
      zero_point: what is subtracted from an unsigned code.
      group: columns that share a scale.
      block: columns that share an activation scale; divides `group`.
      padding: rows of the last tile that are none.
    """

    payload: jax.Array
    scale: jax.Array
    minimum: jax.Array | None = None
    super_scale: jax.Array | None = None
    super_minimum: jax.Array | None = None
    bits: int = struct.field(pytree_node=False, default=8)
    zero_point: int = struct.field(pytree_node=False, default=128)
    group: int = struct.field(pytree_node=False, default=32)
    block: int = struct.field(pytree_node=False, default=32)
    padding: int = struct.field(pytree_node=False, default=0)

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape `[..., R, C]`."""
        *leading, tiles, quads, _ = self.payload.shape
        return (*leading, tiles * TILE - self.padding, quads * 32 // self.bits)

    def __getitem__(self, rows: jax.Array) -> QuantArray:
        """The given rows `[T]` of a matrix as a `QuantArray` of 8-bit codes; for embeddings."""
        C = self.shape[-1]
        tile, lane = rows // TILE, rows % TILE
        quads = self.payload.reshape(-1, self.payload.shape[-2], TILE, 4)[tile, :, lane]
        codes = quads.reshape(*rows.shape, C * self.bits // 8)
        if self.bits == 4:
            halves = codes.reshape(*rows.shape, C // self.block, self.block // 2)
            codes = jnp.concatenate([halves & 15, halves >> 4], axis=-1).reshape(*rows.shape, C)
            codes = codes.astype(jnp.int8)
            shift = 0
        else:
            codes = jax.lax.bitcast_convert_type(codes ^ 128, jnp.int8)
            shift = 128

        def row(values: jax.Array) -> jax.Array:
            return values[tile, :, lane]

        def optional(values: jax.Array | None) -> jax.Array | None:
            return None if values is None else row(values)

        return QuantArray(
            codes,
            row(self.scale),
            optional(self.minimum),
            optional(self.super_scale),
            optional(self.super_minimum),
            bits=8,
            zero_point=self.zero_point - shift,
            group=self.group,
        )


def block_size(group: int, bits: int) -> int:
    """Columns that share an activation scale where weights share one by `group`; 0: none fit.

    The largest divisor of `group` up to 32 that the kernels' steps (four columns, eight for 4-bit
    codes) divide.
    """
    step = 4 if bits == 8 else 8
    sizes = [size for size in range(step, MAX_BLOCK + 1, step) if group % size == 0]
    return max(sizes, default=0)


def can_pack(array: QuantArray) -> bool:
    """Whether `pack` takes this array: its groups must be whole fours of columns."""
    return block_size(array.group, 8) > 0


def pack(array: QuantArray, empty: Empty = aligned_empty) -> PackedArray:
    """`array` in the layout of the CPU kernels, exactly; about as many bytes.

    Runs in numpy on concrete arrays, whose result goes into buffers from `empty`, and in JAX on
    traced ones. 4-bit codes in groups that are not whole eights of columns become 8-bit ones.
    Raises StokerError if `can_pack` is False.
    """
    if not can_pack(array):
        raise StokerError(
            f"weight of shape {list(array.shape)} has {array.group} columns to a scale, which the "
            "CPU kernels cannot pack; use a multiple of 4, or the reference implementation"
        )
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(array)):
        return _pack(jnp, array)
    array = jax.tree.map(np.asarray, array)
    if array.ndim > 2:
        return jax.device_put(_pack(np, array))
    # A slice of rows at a time, into buffers that JAX can adopt: temporaries stay small.
    rows = array.shape[0]
    step = max(TILE, SLICE_BYTES // array.shape[1] // TILE * TILE)
    whole: PackedArray | None = None
    for start in range(0, rows, step):
        part = _pack(np, jax.tree.map(lambda leaf, at=start: leaf[at : at + step], array))
        if whole is None:
            whole = jax.tree.map(
                lambda leaf: empty((-(-rows // TILE), *leaf.shape[1:]), leaf.dtype), part
            )
            whole = dataclasses.replace(whole, padding=-rows % TILE)
        at = start // TILE
        for target, leaf in zip(jax.tree.leaves(whole), jax.tree.leaves(part), strict=True):
            target[at : at + len(leaf)] = leaf
    return jax.device_put(whole)


def _pack(xp: ModuleType, leaves: QuantArray) -> PackedArray:
    """`pack` in NumPy or JAX."""
    bits, codes, zero_point = leaves.bits, leaves.codes, leaves.zero_point
    block = block_size(leaves.group, bits)
    if bits == 4 and block != leaves.group:
        codes = _nibbles(xp, codes, leaves.group)
        if block == 0:
            bits, block = 8, block_size(leaves.group, 8)
        else:
            halves = codes.reshape(*codes.shape[:-1], -1, 2, block // 2)
            codes = (halves[..., 0, :] | halves[..., 1, :] << 4).reshape(*codes.shape[:-1], -1)
    if bits == 8:
        codes, zero_point = codes.view(xp.uint8) ^ xp.uint8(128), zero_point + 128
    scale, super_scale = _scales(xp, leaves.scale, leaves.super_scale)
    minimum, super_minimum = _scales(xp, leaves.minimum, leaves.super_minimum)
    return PackedArray(
        _tiled(xp, codes, 4),
        scale,
        minimum,
        super_scale,
        super_minimum,
        bits=bits,
        zero_point=zero_point,
        group=leaves.group,
        block=block,
        padding=-leaves.shape[-2] % TILE,
    )


def unpack(array: PackedArray) -> QuantArray:
    """The matrix `[R, C]` that `array` was packed from, with 8-bit codes."""
    return array[jnp.arange(array.shape[-2])]


def _nibbles(xp: ModuleType, codes: Any, group: int) -> Any:
    """4-bit codes of a `QuantArray` as bytes, uint8 `[..., C]`."""
    halves = codes.reshape(*codes.shape[:-1], -1, group // 2)
    return xp.concatenate([halves & 15, halves >> 4], axis=-1).reshape(*codes.shape[:-1], -1)


def _tiled(xp: ModuleType, values: Any, unit: int) -> Any:
    """`[..., R, X]` as `[..., R/16, X/unit, 16 * unit]`; runs of `unit` columns stay together."""
    *leading, R, _ = values.shape
    if R % TILE:
        values = xp.pad(values, [(0, 0)] * len(leading) + [(0, -R % TILE), (0, 0)])
    if xp is np and unit == 4:
        # One 4-byte item is much quicker to move than four bytes.
        values, unit = np.ascontiguousarray(values).view(np.uint32), 1
    tiles = values.reshape(*leading, -1, TILE, values.shape[-1] // unit, unit)
    moved = xp.ascontiguousarray(tiles.swapaxes(-3, -2)) if xp is np else tiles.swapaxes(-3, -2)
    flat = moved.reshape(*moved.shape[:-2], TILE * unit)
    return flat.view(np.uint8) if flat.dtype == np.uint32 else flat


def _scales(xp: ModuleType, values: Any, factor: Any) -> tuple[Any, Any]:
    """Scales (or minima) and their factors, tiled; both None where there are none.

    Integers that do not fit a byte are multiplied out to float32.
    """
    if values is None:
        return None, None
    if factor is not None and values.dtype not in (jnp.int8, jnp.uint8):
        repeats = values.shape[-1] // factor.shape[-1]
        values = values.astype(xp.float32) * xp.repeat(factor.astype(xp.float32), repeats, axis=-1)
        factor = None
    if factor is None and values.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32):
        values = values.astype(xp.float32)
    return _tiled(xp, values, 1), None if factor is None else _tiled(xp, factor, 1)
