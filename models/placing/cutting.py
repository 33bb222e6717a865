"""Parts of host arrays, dense or quantised, cut along any axis: exact, and padded with zeros."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ...sharding import Cut
from ..quantized import QuantArray

#: Where a part begins and ends along one axis.
Span = tuple[int, int]


def cut_columns(value: Any, cut: Cut) -> list[Any]:
    """The parts of a matrix's last axis, with NumPy leaves; values are those of the whole."""
    value = divisible(value, step_of(cut, value.shape[-1]))
    rows = [(0, size) for size in value.shape[:-1]]
    sizes = [*value.shape[:-1], cut.width]
    return [part_of(value, [*rows, span], sizes) for span in cut.ranges]


def step_of(cut: Cut, size: int) -> int:
    """The largest number that every boundary of a cut of `size` elements is a multiple of."""
    ends = (at for span in cut.ranges for at in span if at < size)
    return math.gcd(cut.width, size, *ends)


def divisible(value: Any, step: int) -> Any:
    """`value` with groups, and runs of them, that every multiple of `step` columns falls between.

    Where groups are longer they are made smaller, each with the scale of the one it comes from; and
    factors that several groups share are multiplied into their scales, which float32 holds exactly.
    So no value changes.
    """
    if not isinstance(value, QuantArray):
        return value
    array = jax.tree.map(np.asarray, value)
    columns = array.shape[-1]
    factors = [x.shape[-1] for x in (array.super_scale, array.super_minimum) if x is not None]
    if any(step % (columns // count) for count in factors):
        array = without_factors(array)
    if step % array.group:
        array = _regrouped(array, math.gcd(step, array.group))
    return array


def part_of(value: Any, spans: Sequence[Span], sizes: Sequence[int]) -> Any:
    """What lies in `spans`, one for each axis, with zeros up to `sizes`.

    Columns of a `QuantArray` are cut between groups, and between runs of them that share a factor.
    """
    columns = value.shape[-1]

    def leaf_part(leaf: Any) -> np.ndarray:
        # Leaves of a quantised matrix have fewer entries along its columns.
        start, end, size = (at * leaf.shape[-1] // columns for at in (*spans[-1], sizes[-1]))
        return _padded(leaf, [*spans[:-1], (start, end)], [*sizes[:-1], size])

    return jax.tree.map(leaf_part, value)


def _padded(leaf: Any, spans: Sequence[Span], sizes: Sequence[int]) -> np.ndarray:
    part = np.asarray(leaf[tuple(slice(*span) for span in spans)])
    missing = [(0, size - found) for size, found in zip(sizes, part.shape, strict=True)]
    if any(count for _, count in missing):
        # Zero bytes: powers of two (float8_e8m0fnu) have no zero, and codes of zero need none.
        raw = part.view(np.uint8) if part.dtype.itemsize == 1 else part
        return np.ascontiguousarray(np.pad(raw, missing)).view(part.dtype)
    # A view would keep the whole alive; one of all of it is it.
    return np.array(part, order="C", copy=part.shape != leaf.shape or None)


def without_factors(array: QuantArray) -> QuantArray:
    """The same matrix, with factors that groups share multiplied into their scales and minima."""

    def product(values: Any, factor: Any) -> Any:
        if values is None or factor is None:
            return values
        repeats = values.shape[-1] // factor.shape[-1]
        wide = np.repeat(np.asarray(factor, np.float32), repeats, axis=-1)
        return np.asarray(values, np.float32) * wide

    return dataclasses.replace(
        array,
        scale=product(array.scale, array.super_scale),
        minimum=product(array.minimum, array.super_minimum),
        super_scale=None,
        super_minimum=None,
    )


def _regrouped(array: QuantArray, group: int) -> QuantArray:
    """The same matrix in smaller groups; 4-bit codes of odd ones take a byte each."""
    codes: Any = array.codes
    bits = array.bits
    repeats = array.group // group
    array = without_factors(array)
    if bits == 4:
        halves = codes.reshape(*codes.shape[:-1], -1, array.group // 2)
        flat = np.concatenate([halves & 15, halves >> 4], axis=-1)
        if group % 2:
            bits, codes = 8, flat.reshape(*codes.shape[:-1], -1).view(np.int8)
        else:
            pairs = flat.reshape(*codes.shape[:-1], -1, 2, group // 2)
            packed = pairs[..., 0, :] | pairs[..., 1, :] << np.uint8(4)
            codes = packed.reshape(*codes.shape[:-1], -1)

    def repeated(values: Any) -> Any:
        return None if values is None else np.repeat(values, repeats, axis=-1)

    return dataclasses.replace(
        array,
        codes=codes,
        scale=repeated(array.scale),
        minimum=repeated(array.minimum),
        bits=bits,
        group=group,
    )
