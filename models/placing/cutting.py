"""Parts of host arrays, dense or quantised, cut along any axis: exact, and padded with zeros."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from ...sharding import Cut
from ..quantized import QuantArray


def cut_columns(value: Any, cut: Cut) -> list[Any]:
    """The parts of a matrix's last axis, with NumPy leaves.

    Columns of a `QuantArray` are cut between groups where the cut allows. Where it does not, groups
    are made smaller, each with the scale of the one it comes from; and factors that several groups
    share are multiplied into their scales, which float32 holds exactly. So no value changes.
    """
    if not isinstance(value, QuantArray):
        return [_part(value, -1, span, cut.width) for span in cut.ranges]
    value = _finer(jax.tree.map(np.asarray, value), cut)
    columns = value.shape[-1]

    def leaf_part(leaf: np.ndarray, span: tuple[int, int]) -> np.ndarray:
        start, end, width = (at * leaf.shape[-1] // columns for at in (*span, cut.width))
        return _part(leaf, -1, (start, end), width)

    return [
        jax.tree.map(lambda leaf, span=span: leaf_part(leaf, span), value) for span in cut.ranges
    ]


def cut_axis(value: Any, axis: int, cut: Cut) -> list[Any]:
    """The parts along an axis other than a quantised matrix's last."""
    return [
        jax.tree.map(lambda leaf, span=span: _part(leaf, axis, span, cut.width), value)
        for span in cut.ranges
    ]


def pad_rows(value: Any, rows: int) -> Any:
    """`value` with zeros after its first axis, up to so many."""
    return jax.tree.map(lambda leaf: _part(leaf, 0, (0, leaf.shape[0]), rows), value)


def _part(leaf: Any, axis: int, span: tuple[int, int], width: int) -> np.ndarray:
    axis %= leaf.ndim
    part = np.asarray(leaf[(*(slice(None),) * axis, slice(*span))])
    missing = width - part.shape[axis]
    if missing:
        # Zero bytes: powers of two (float8_e8m0fnu) have no zero, and codes of zero need none.
        raw = part.view(np.uint8) if part.dtype.itemsize == 1 else part
        raw = np.pad(raw, [(0, missing if at == axis else 0) for at in range(part.ndim)])
        part = raw.view(part.dtype)
    # A view would keep the whole alive.
    return np.array(part, order="C", copy=part.base is not None or None)


def _finer(array: QuantArray, cut: Cut) -> QuantArray:
    """`array` with groups, and runs of them, that every boundary of `cut` falls between."""
    columns = array.shape[-1]
    ends = (at for span in cut.ranges for at in span if at < columns)
    step = math.gcd(cut.width, columns, *ends)
    factors = [x.shape[-1] for x in (array.super_scale, array.super_minimum) if x is not None]
    if any(step % (columns // count) for count in factors):
        array = _without_factors(array)
    if step % array.group:
        array = _regrouped(array, math.gcd(step, array.group))
    return array


def _without_factors(array: QuantArray) -> QuantArray:
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
    array = _without_factors(array)
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
