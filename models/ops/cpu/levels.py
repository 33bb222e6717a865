"""Codes that stand for levels, such as four-bit floats, as integers that kernels multiply with."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...quantized import QuantArray

#: Largest entry of a table: AVX2 adds two products with 127 in 16 bits.
LARGEST = 127


def denominator(levels: tuple[float, ...]) -> int:
    """The least power of two times which all `levels` are 8-bit integers; 0: there is none."""
    for factor in (1 << power for power in range(8)):
        if all(float(level * factor).is_integer() for level in levels):
            return factor if all(-128 <= level * factor <= 127 for level in levels) else 0
    return 0


def half_scales(array: QuantArray) -> bool:
    """Whether scales that make up for whole levels are float16 without loss.

    Those are what products read themselves. Of a whole array in NumPy: all its slices get one type.
    """
    if not array.levels or array.super_scale is not None:
        return False
    wide = np.asarray(array.scale).astype(np.float32) / denominator(array.levels)
    with np.errstate(over="ignore"):
        return bool((wide.astype(np.float16).astype(np.float32) == wide).all())


def as_integers(xp: ModuleType, array: QuantArray, narrow: bool) -> QuantArray:
    """`array` with integers in place of its levels, and scales that make up for it.

    Where `narrow`, scales are float16 (see `half_scales`), else bfloat16 if they were, or float32.

    4-bit codes remain where the integers, less the smallest, are at most `LARGEST`: `levels` are
    then these, and the smallest is in the zero point. Otherwise codes become 8-bit integers.
    """
    if not array.levels:
        return array
    factor = denominator(array.levels)
    integers = [int(level * factor) for level in array.levels]
    scale, super_scale = array.scale, array.super_scale
    # Powers of two lose nothing in types with the exponents of float32.
    share = np.float32(1 / factor)
    if super_scale is not None:
        super_scale = super_scale.astype(xp.float32) * share
    else:
        kind = xp.float16 if narrow else scale.dtype if scale.dtype == jnp.bfloat16 else xp.float32
        scale = (scale.astype(xp.float32) * share).astype(kind)
    least = min(integers)
    small = max(integers) - least <= LARGEST
    if small and array.minimum is None and array.group % 8 == 0:
        return dataclasses.replace(
            array,
            scale=scale,
            super_scale=super_scale,
            zero_point=array.zero_point * factor - least,
            levels=tuple(float(integer - least) for integer in integers),
        )
    return dataclasses.replace(
        array,
        codes=xp.asarray(integers, xp.int8)[nibbles(xp, array.codes, array.group)],
        scale=scale,
        super_scale=super_scale,
        bits=8,
        zero_point=array.zero_point * factor,
        levels=(),
    )


def nibbles(xp: ModuleType, codes: Any, group: int) -> Any:
    """4-bit codes of a `QuantArray` as bytes, uint8 `[..., C]`."""
    halves = codes.reshape(*codes.shape[:-1], -1, group // 2)
    return xp.concatenate([halves & 15, halves >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
