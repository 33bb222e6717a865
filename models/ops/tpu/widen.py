"""Quantised weights made wide inside a kernel: codes, scales and minima as Mosaic can read them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ...quantized import QuantArray
from .common import LANES

#: Bytes of codes of a row that are widened at once.
PIECE = 512
#: Least bytes of a group: those of a piece must not need more scales than a register has.
_LEAST_SPAN = PIECE // LANES
#: Types of codes that a kernel widens.
_CODES = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2")
#: Types of scales and minima that a kernel reads.
_SCALES = (
    *("float32", "float16", "int16", "bfloat16"),
    *("int8", "uint8", "float8_e8m0fnu", "float8_e4m3fn"),
)


def why_unsupported(weight: QuantArray) -> str | None:
    """Why the kernels cannot widen `weight`; None if they can.

    Groups must fill registers of 128 lanes, or registers groups; or a row is one group.
    """
    span = weight.group * weight.bits // 8
    if (span < _LEAST_SPAN or span & (span - 1)) and weight.scale.shape[-1] != 1:
        return f"groups of {weight.group} codes of {weight.bits} bits do not fit registers"
    if str(weight.codes.dtype) not in _CODES:
        return f"codes of {weight.codes.dtype} are not widened"
    factors = (weight.scale, weight.minimum, weight.super_scale, weight.super_minimum)
    for dtype in (part.dtype for part in factors if part is not None):
        if str(dtype) not in _SCALES:
            return f"scales of {dtype} are not read"
    for part, factor in zip(factors[:2], factors[2:], strict=True):
        if part is not None and factor is not None and part.shape[-1] % factor.shape[-1]:
            return "factors of scales do not divide the groups"
    return None


@dataclasses.dataclass(frozen=True)
class Format:
    """How the leaves of a quantised array are read: what a kernel is compiled for.

    Attributes:
      bits: of a code.
      zero_point: what is subtracted from it.
      span: bytes of codes that share a scale.
      columns: bytes of codes in a row.
      levels: see `QuantArray`.
      kinds: types of scale, minimum and their factors, or "" for those that are not there.
      turned: which of those that are there come as `[..., groups, R]`, in turn.
    """

    bits: int
    zero_point: int
    span: int
    columns: int
    levels: tuple[float, ...]
    kinds: tuple[str, ...]
    turned: tuple[bool, ...]

    @property
    def groups(self) -> int:
        """Groups of a row."""
        return self.columns // self.span


def format_of(weight: QuantArray) -> tuple[Format, list[jax.Array]]:
    """What a kernel must know of `weight`, and its leaves with types that Mosaic can load.

    XLA lays arrays whose rows do not fill whole registers out by columns, so that turning such
    scales moves nothing; as they are, it would copy them for the kernel.
    """
    factors = (weight.scale, weight.minimum, weight.super_scale, weight.super_minimum)
    kinds = tuple("" if part is None else str(part.dtype) for part in factors)
    there = [part for part in factors if part is not None]
    turned = tuple(part.shape[-1] % LANES != 0 for part in there)
    leaves = [
        part.swapaxes(-1, -2) if turn else part for part, turn in zip(there, turned, strict=True)
    ]
    return Format(
        bits=weight.bits,
        zero_point=weight.zero_point,
        span=weight.group * weight.bits // 8,
        columns=weight.row_bytes,
        levels=tuple(getattr(weight, "levels", ())),
        kinds=kinds,
        turned=turned,
    ), [_loadable(leaf) for leaf in (weight.codes, *leaves)]


def _loadable(leaf: jax.Array) -> jax.Array:
    """Float16 as the integers of the same bits, since Mosaic has no such type.

    XLA copies the leaf to do so: `quantized.ready` saves that.
    """
    return jax.lax.bitcast_convert_type(leaf, jnp.int16) if leaf.dtype == jnp.float16 else leaf


def _floats(bits: jax.Array, kind: str) -> jax.Array:
    """What loaded scales stand for, float32; exact."""
    if kind in ("float16", "int16"):
        wide = bits.astype(jnp.int32)
        rest = wide & 0x7FFF
        # The exponent's bias grows from 15 to 127. Subnormals have none.
        normal = jax.lax.bitcast_convert_type((rest << 13) + (112 << 23), jnp.float32)
        tiny = rest.astype(jnp.float32) * 2.0**-24
        size = jnp.where(rest < 0x400, tiny, normal)
        return jnp.where(wide < 0, -size, size)
    if kind in ("int8", "uint8"):
        return bits.astype(jnp.int32).astype(jnp.float32)
    return bits.astype(jnp.float32)


def scratch_width(format_: Format) -> int:
    """Lanes that a row's scales take, in whole registers."""
    return -(-format_.groups // LANES) * LANES


def read_scales(refs: list[Any], format_: Format, scratch: list[Any]) -> None:
    """Puts float32 scales `[Rb, groups]`, and minima, into scratch of whole registers.

    `refs` are those of the scale, the minimum and their factors, as far as they are there.
    """
    there = iter(zip(refs, format_.turned, strict=True))
    scale, minimum, super_scale, super_minimum = (
        next(there) if kind else None for kind in format_.kinds
    )
    kinds = format_.kinds
    for part, factor, kind, factor_kind, target in zip(
        (scale, minimum), (super_scale, super_minimum), kinds[:2], kinds[2:], scratch, strict=False
    ):
        if part is None:
            continue
        values, groups = _rows(part, kind)
        if factor is not None:
            factors, n_factors = _rows(factor, factor_kind)
            values = values * _spread(factors, groups // n_factors, values.shape[1])
        target[...] = values


def _rows(part: tuple[Any, bool], kind: str) -> tuple[jax.Array, int]:
    """Scales float32 `[R, ...]` in whole registers, of which the first so many count."""
    ref, turned = part
    values = _floats(ref[0], kind)
    if not turned:
        return _whole(values), values.shape[1]
    groups = values.shape[0]
    missing = jnp.zeros((-groups % LANES, values.shape[1]), jnp.float32)
    return jnp.concatenate([values, missing], axis=0).T, groups


def read_turned(refs: list[Any], format_: Format) -> list[jax.Array]:
    """Scales, and minima, float32 `[groups, Rb]`, where neither has factors."""
    kinds = (kind for kind in format_.kinds if kind)
    wide = [_floats(ref[0], kind) for ref, kind in zip(refs, kinds, strict=True)]
    turned = format_.turned
    return [part if turn else part.T for part, turn in zip(wide, turned, strict=True)]


def _whole(values: jax.Array) -> jax.Array:
    """`values [R, n]` followed by zeros, in whole registers."""
    missing = -values.shape[1] % LANES
    if not missing:
        return values
    return jnp.concatenate([values, jnp.zeros((values.shape[0], missing), values.dtype)], axis=1)


def _spread(factors: jax.Array, share: int, width: int) -> jax.Array:
    """`[R, width]`, element g being factor g // share."""
    parts = []
    for start in range(0, width, LANES):
        lanes = min(LANES, width - start)
        first = start // share // LANES * LANES
        index = (start + _lanes((factors.shape[0], LANES))) // share - first
        source = factors[:, first : first + LANES]
        parts.append(pick(source, index)[:, :lanes])
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _lanes(shape: tuple[int, int]) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, 1)


def pick(source: jax.Array, index: jax.Array) -> jax.Array:
    """`source[r, index[r, l]]` of arrays `[R, 128]`: one exchange of lanes to each register."""
    return jnp.take_along_axis(source, index, axis=1, mode="promise_in_bounds")


def widen(
    codes: jax.Array, start: Any, format_: Format, scratch: list[Any], dtype: Any
) -> list[jax.Array]:
    """Weights of `codes [Rb, width]`, whose first byte is number `start` of its row.

    Returns:
      `[Rb, width]` of `dtype`; or two for codes of four bits, the low and the high halves.
    """
    width = codes.shape[1]
    halves: list[list[jax.Array]] = [[] for _ in range(8 // format_.bits)]
    rows = codes.shape[0]
    first = start // format_.span // LANES * LANES
    sources = [part[:, register(first)] for part in scratch]
    for tile in range(0, width, LANES):
        lanes = min(LANES, width - tile)
        if format_.groups == 1:
            picked = [jnp.broadcast_to(source[:, :1], (rows, lanes)) for source in sources]
        else:
            index = (start + tile) // format_.span - first + _divided(min(format_.span, LANES))
            index = jnp.broadcast_to(index, (rows, LANES))
            picked = [pick(source, index)[:, :lanes] for source in sources]
        for half, values in zip(
            halves, _values(codes[:, tile : tile + lanes], format_), strict=True
        ):
            wide = values * picked[0]
            if len(picked) > 1:
                wide = wide + picked[1]
            half.append(wide.astype(dtype))
    return [half[0] if len(half) == 1 else jnp.concatenate(half, axis=1) for half in halves]


def _divided(share: int) -> jax.Array:
    """int32 `[1, 128]`, lane l having l // share; share is a power of two."""
    return _lanes((1, LANES)) >> (share.bit_length() - 1)


def register(first: Any) -> Any:
    """A register's lanes from `first` on, a multiple of them."""
    return pl.ds(first if isinstance(first, int) else pl.multiple_of(first, LANES), LANES)


def _values(codes: jax.Array, format_: Format) -> list[jax.Array]:
    """Codes less their zero point, or their levels, float32; low and high halves of bytes."""
    if format_.bits == 8:
        if not jnp.issubdtype(codes.dtype, jnp.integer):
            return [codes.astype(jnp.float32)]
        return [_shifted(codes.astype(jnp.int32), format_.zero_point)]
    wide = codes.astype(jnp.int32)
    parts = [wide & 15, (wide >> 4) & 15]
    if not format_.levels:
        return [_shifted(part, format_.zero_point) for part in parts]
    rows, lanes = codes.shape
    lane = _lanes((rows, LANES))
    table = jnp.zeros((rows, LANES), jnp.float32)
    for number, level in enumerate(format_.levels):
        table = jnp.where(lane == number, level, table)
    if lanes < LANES:
        missing = jnp.zeros((rows, LANES - lanes), jnp.int32)
        parts = [jnp.concatenate([part, missing], axis=1) for part in parts]
    return [pick(table, part)[:, :lanes] - format_.zero_point for part in parts]


def _shifted(codes: jax.Array, zero_point: int) -> jax.Array:
    return (codes - zero_point if zero_point else codes).astype(jnp.float32)
