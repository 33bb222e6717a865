"""Quantised weights in the interleaved layout that the CPU kernels stream."""

from __future__ import annotations

import dataclasses
import math
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ...errors import StokerError
from ...host_arrays import Empty, aligned_empty
from ...quantized import LogicalArray, QuantArray
from .levels import as_integers, denominator, half_scales, nibbles

#: Rows (outputs) of a tile, kTile in kernels.h.
TILE = 16
#: Bytes of codes packed at a time.
SLICE_BYTES = 1 << 20
#: Most columns that share an activation scale: as in the formats of llama.cpp.
MAX_BLOCK = 32


@dataclasses.dataclass(frozen=True)
class Part:
    """One kind of numbers in a record, for all 16 rows of its tile.

    Attributes:
      dtype: of a number.
      count: numbers for each row; 0 where a format has none.
      unit: numbers of a row that follow each other, before those of the next row.
    """

    dtype: str = "uint8"
    count: int = 0
    unit: int = 1

    @property
    def row_bytes(self) -> int:
        """Bytes of each row."""
        return self.count * jnp.dtype(self.dtype).itemsize

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit."""
        return self.unit * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Record:
    """What the columns of one record hold, in this order, without gaps.

    Attributes:
      super_scale: factors of runs of scales.
      super_minimum: factors of runs of minima.
      scale: one to each group of columns.
      minimum: likewise.
      codes: bytes of codes, four to a unit.
    """

    super_scale: Part
    super_minimum: Part
    scale: Part
    minimum: Part
    codes: Part

    @property
    def parts(self) -> dict[str, Part]:
        """The parts by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@struct.dataclass
class PackedArray(LogicalArray):
    """A matrix `[R, C]` with the values of the `QuantArray` it was packed from, 16 rows to a tile.

    A tile is a run of records: all that some neighbouring columns of its rows need, so that a
    product reads one stream of memory and a step passes one array. In a record come factors of
    scales and minima, scales, minima, and codes, each number for all 16 rows. Codes follow each
    other four columns at a time: 64 bytes are 16 rows of 4 columns, one 512-bit register. With
    4-bit codes a byte holds a column of a block's first half in its low nibble, and the column
    half a block later in its high nibble. Codes are unsigned: signed ones are stored plus 128, and
    `zero_point` with them. Leading axes may precede.

    Attributes:
      payload: uint8 `[R/16, records, bytes of a record]`.
      record: what a record holds.
      bits: 4 or 8.
      zero_point: what is subtracted from an unsigned code; 0 where 4-bit codes have minima.
      group: columns that share a scale.
      block: columns that share an activation scale; divides `group`.
      padding: rows of the last tile that are none.
      table: what 4-bit codes stand for, of 0 to `levels.LARGEST`; empty where for themselves.
    """

    payload: jax.Array
    record: Record = struct.field(pytree_node=False)
    bits: int = struct.field(pytree_node=False, default=8)
    zero_point: int = struct.field(pytree_node=False, default=128)
    group: int = struct.field(pytree_node=False, default=32)
    block: int = struct.field(pytree_node=False, default=32)
    padding: int = struct.field(pytree_node=False, default=0)
    table: tuple[int, ...] = struct.field(pytree_node=False, default=())

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape `[..., R, C]`."""
        *leading, tiles, records, _ = self.payload.shape
        columns = self.record.scale.count * self.group
        return (*leading, tiles * TILE - self.padding, records * columns)

    def __getitem__(self, rows: jax.Array) -> QuantArray:
        """The given rows `[T]` of a matrix as a `QuantArray` of 8-bit codes; for embeddings."""
        C = self.shape[-1]
        parts = self._row_bytes(rows)
        codes = parts["codes"]
        if self.bits == 4:
            halves = codes.reshape(*rows.shape, C // self.block, self.block // 2)
            codes = jnp.concatenate([halves & 15, halves >> 4], axis=-1).reshape(*rows.shape, C)
            codes = codes.astype(jnp.int8)
            if self.table:
                codes = jnp.asarray(self.table, jnp.int8).at[codes].get(mode="promise_in_bounds")
            shift = 0
        else:
            codes = jax.lax.bitcast_convert_type(codes ^ 128, jnp.int8)
            shift = 128

        def numbers(name: str) -> jax.Array | None:
            part = self.record.parts[name]
            if part.count == 0:
                return None
            single = jnp.dtype(part.dtype).itemsize == 1
            units = parts[name] if single else parts[name].reshape(*rows.shape, -1, part.unit_bytes)
            return jax.lax.bitcast_convert_type(units, part.dtype)

        scale = numbers("scale")
        assert scale is not None
        return QuantArray(
            codes,
            scale,
            numbers("minimum"),
            numbers("super_scale"),
            numbers("super_minimum"),
            bits=8,
            zero_point=self.zero_point - shift,
            group=self.group,
        )

    def _row_bytes(self, rows: jax.Array) -> dict[str, jax.Array]:
        """Bytes `[T, n]` of each part of the given rows; nothing else is read."""
        records, record_bytes = self.payload.shape[-2:]
        at, found = 0, {}
        for name, part in self.record.parts.items():
            if part.count == 0:
                continue
            # Where the bytes of row 0 are, and how much further those of the next row.
            unit = part.unit_bytes
            first = at + np.arange(part.row_bytes // unit)[:, None] * TILE * unit + np.arange(unit)
            first = np.arange(records)[:, None] * record_bytes + first.reshape(-1)
            places = first.reshape(-1) + (rows % TILE)[..., None] * unit
            found[name] = self.payload.reshape(-1, records * record_bytes)[
                (rows // TILE)[..., None], places
            ]
            at += part.row_bytes * TILE
        return found


def block_size(group: int, bits: int) -> int:
    """Columns that share an activation scale where weights share one by `group`; 0: none fit.

    The largest divisor of `group` up to 32 that the kernels' steps (four columns, eight for 4-bit
    codes) divide.
    """
    step = 4 if bits == 8 else 8
    sizes = [size for size in range(step, MAX_BLOCK + 1, step) if group % size == 0]
    return max(sizes, default=0)


def can_pack(array: QuantArray) -> bool:
    """Whether `pack` takes this array.

    Its groups must be whole fours of columns, and its codes integers, or levels that are integers
    times a power of two.
    """
    whole = not array.levels or denominator(array.levels) > 0
    integers = jnp.issubdtype(array.codes.dtype, jnp.integer)
    return integers and whole and block_size(array.group, 8) > 0


def pack(array: QuantArray, empty: Empty = aligned_empty) -> PackedArray:
    """`array` in the layout of the CPU kernels, exactly; about as many bytes.

    Runs in numpy on concrete arrays, whose result goes into buffers from `empty`, and in JAX on
    traced ones. 4-bit codes in groups that are not whole eights of columns, or with a zero point
    beside a minimum, become 8-bit ones, and so do levels that are no table of the kernels
    (`levels.as_integers`). Raises StokerError if
    `can_pack` is False.
    """
    if not can_pack(array):
        if block_size(array.group, 8):
            raise StokerError(
                f"weight of shape {list(array.shape)} has codes of {array.codes.dtype} that stand "
                "for no 8-bit integers; widen it with stoker.models.ops.cpu.prepare, or use the "
                "reference implementation"
            )
        raise StokerError(
            f"weight of shape {list(array.shape)} has {array.group} columns to a scale, which the "
            "CPU kernels cannot pack; use a multiple of 4, or the reference implementation"
        )
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(array)):
        return _pack(jnp, array)
    array = jax.tree.map(np.asarray, array)
    narrow = half_scales(array)
    # A slice of rows at a time, into a buffer that JAX can adopt: temporaries stay small.
    *leading, rows, columns = array.shape
    step = max(TILE, SLICE_BYTES // columns // TILE * TILE)
    whole: Any = None
    for index in np.ndindex(*leading):
        for start in range(0, rows, step):
            place = (*index, slice(start, start + step))
            part = _pack(np, jax.tree.map(lambda leaf, place=place: leaf[place], array), narrow)
            if whole is None:
                shape = (*leading, -(-rows // TILE), *part.payload.shape[1:])
                buffer: Any = empty(shape, np.dtype(np.uint8))
                whole = dataclasses.replace(part, payload=buffer, padding=-rows % TILE)
            at = start // TILE
            whole.payload[index][at : at + len(part.payload)] = part.payload
    return jax.device_put(whole)


def _pack(xp: ModuleType, leaves: QuantArray, narrow: bool = False) -> PackedArray:
    """`pack` in NumPy or JAX; where `narrow`, the scales of levels become float16."""
    scale, super_scale = _scales(leaves.scale, leaves.super_scale, xp)
    leaves = dataclasses.replace(leaves, scale=scale, super_scale=super_scale)
    leaves = as_integers(xp, leaves, narrow)
    table = tuple(map(int, leaves.levels))
    bits, codes, zero_point = leaves.bits, leaves.codes, leaves.zero_point
    block = block_size(leaves.group, bits)
    # Kernels expect no zero point of 4-bit codes that have a minimum.
    wide = block == 0 or (leaves.minimum is not None and zero_point != 0)
    if bits == 4 and (wide or block != leaves.group):
        codes = nibbles(xp, codes, leaves.group)
        if wide:
            bits, block = 8, block_size(leaves.group, 8)
        else:
            halves = codes.reshape(*codes.shape[:-1], -1, 2, block // 2)
            codes = (halves[..., 0, :] | halves[..., 1, :] << 4).reshape(*codes.shape[:-1], -1)
    if bits == 8:
        codes, zero_point = codes.view(xp.uint8) ^ xp.uint8(128), zero_point + 128
    scale, super_scale = leaves.scale, leaves.super_scale
    minimum, super_minimum = _scales(leaves.minimum, leaves.super_minimum, xp)
    if super_scale is not None and super_minimum is not None:
        shared = math.gcd(super_scale.shape[-1], super_minimum.shape[-1])
        assert shared == super_scale.shape[-1] == super_minimum.shape[-1], "factors of one length"
    values = {
        "super_scale": super_scale,
        "super_minimum": super_minimum,
        "scale": scale,
        "minimum": minimum,
        "codes": codes,
    }
    records = _records(leaves.shape[-1] // leaves.group, values)
    parts = {
        name: Part()
        if value is None
        else Part(str(value.dtype), value.shape[-1] // records, 4 if name == "codes" else 1)
        for name, value in values.items()
    }
    payload = [
        _tiled(xp, value, parts[name], records)
        for name, value in values.items()
        if value is not None
    ]
    return PackedArray(
        xp.concatenate(payload, axis=-1),
        Record(**parts),
        bits=bits,
        zero_point=zero_point,
        group=leaves.group,
        block=block,
        padding=-leaves.shape[-2] % TILE,
        table=table,
    )


def _records(groups: int, values: dict[str, Any]) -> int:
    """Records of a row: one to each factor or else group; or to two, if that aligns its codes."""
    factors = [v.shape[-1] for k, v in values.items() if "super" in k and v is not None]
    records = math.gcd(*factors) if factors else groups
    heads = (v for k, v in values.items() if k != "codes" and v is not None)
    head_bytes = sum(v.shape[-1] // records * TILE * v.dtype.itemsize for v in heads)
    return records // 2 if head_bytes % 64 and records % 2 == 0 else records


def unpack(array: PackedArray) -> QuantArray:
    """The matrix `[..., R, C]` that `array` was packed from, with 8-bit codes."""
    if array.ndim > 2:
        return jax.vmap(unpack)(array)
    return array[jnp.arange(array.shape[-2])]


def _tiled(xp: ModuleType, values: Any, part: Part, records: int) -> Any:
    """Numbers `[..., R, n]` as bytes `[..., R/16, records, bytes]`, by unit and row."""
    *leading, R, _ = values.shape
    if R % TILE:
        values = xp.pad(values, [(0, 0)] * len(leading) + [(0, -R % TILE), (0, 0)])
    unit = part.unit_bytes
    last: tuple[int, ...] = ()
    if xp is np:
        # Items of a unit's bytes are much quicker to move than single bytes.
        values = np.ascontiguousarray(values).view({1: np.uint8, 2: np.uint16, 4: np.uint32}[unit])
    else:
        values, last = jax.lax.bitcast_convert_type(values, jnp.uint8), (unit,)
    tiles = values.reshape(*leading, -1, TILE, records, part.row_bytes // unit, *last)
    rows = len(leading) + 1
    tiles = xp.moveaxis(tiles, rows, rows + 2)
    flat = xp.ascontiguousarray(tiles) if xp is np else tiles
    flat = flat.reshape(*flat.shape[: rows + 1], -1)
    return flat.view(np.uint8) if xp is np else flat


def _scales(values: Any, factor: Any, xp: ModuleType) -> tuple[Any, Any]:
    """Scales (or minima) and their factors as they are stored; both None where there are none.

    Integers that do not fit a byte are multiplied out to float32.
    """
    if values is None:
        return None, None
    if factor is not None and values.dtype not in (jnp.int8, jnp.uint8):
        repeats = values.shape[-1] // factor.shape[-1]
        values = values.astype(xp.float32) * xp.repeat(factor.astype(xp.float32), repeats, axis=-1)
        factor = None
    if factor is None and values.dtype == jnp.float8_e8m0fnu:
        values = values.astype(jnp.bfloat16)  # has all its powers of two
    if factor is None and values.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32):
        values = values.astype(xp.float32)
    return values, factor
