"""From the numbers of the formats to the leaves of a `QuantArray`, in NumPy."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from ...quantized import E2M1, QuantArray

#: Values that share a whole number of words, whatever their width.
_RUN = 32


def unpack_words(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Unsigned `bits`-wide values from a stream of bits that begins with each row's lowest one.

    Args:
      words: int32 `[..., n]`; values may straddle words.
      bits: 1 to 8.
      count: values of a row.

    Returns:
      uint8 `[..., count]`.
    """
    if bits in (4, 8):  # nothing straddles words, whose first byte is the lowest
        stored = np.ascontiguousarray(words, "<i4").view(np.uint8)
        return (stored if bits == 8 else neighbours(stored))[..., :count]
    words = words.view(np.uint32)
    runs = -(-count // _RUN)
    missing = runs * bits - words.shape[-1]
    if missing > 0:
        words = np.pad(words, [(0, 0)] * (words.ndim - 1) + [(0, missing)])
    words = words[..., : runs * bits].reshape(*words.shape[:-1], runs, bits)
    values = np.empty((*words.shape[:-1], _RUN), np.uint8)
    for index in range(_RUN):
        word, shift = divmod(index * bits, 32)
        value = words[..., word] >> np.uint32(shift)
        if shift + bits > 32:
            value = value | words[..., word + 1] << np.uint32(32 - shift)
        values[..., index] = value & np.uint32(2**bits - 1)
    return values.reshape(*values.shape[:-2], -1)[..., :count]


def halves(codes: np.ndarray, group: int) -> Any:
    """4-bit codes uint8 `[..., C]` two to a byte, as a `QuantArray` has them: `[..., C/2]`."""
    pairs = codes.reshape(*codes.shape[:-1], -1, 2, group // 2)
    return (pairs[..., 0, :] | pairs[..., 1, :] << 4).reshape(*codes.shape[:-1], -1)


def neighbours(packed: np.ndarray) -> np.ndarray:
    """4-bit codes uint8 `[..., C]` of bytes `[..., C/2]` that hold two neighbours, low first."""
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), np.uint8)
    np.bitwise_and(packed, 15, out=codes[..., ::2])
    np.right_shift(packed, 4, out=codes[..., 1::2])
    return codes


def spread(scale: np.ndarray, rows: int, columns: int, block: tuple[int, int], whole: int) -> Any:
    """Scales of blocks `[..., R/b0, C/b1]`, rounded up, as scales of groups, `[..., R, C/group]`.

    Returns the scales and `group`, the largest that fits both a block and a row: the whole block
    where that divides the row. Of rows of `whole` columns, these may be parts, between blocks or of
    the only one.
    """
    height, width = block
    group = columns if width >= whole else math.gcd(width, whole)
    if height > 1:
        scale = np.repeat(scale, height, axis=-2)[..., :rows, :]
    if group < width < whole:
        scale = np.repeat(scale, width // group, axis=-1)[..., : columns // group]
    return np.ascontiguousarray(scale), group


def integers(
    codes: Any, scale: Any, zero: Any, bits: int, group: int, symmetric: bool = False
) -> QuantArray:
    """`(codes - zero) * scale`, of unsigned codes up to 8 bits wide.

    Codes of 4 bits or fewer take four bits where groups are even, all others take eight. Zero
    points become minima `-zero * scale` in float32: with scales that have the precision of float16
    or bfloat16, sums of the two are exact. Symmetric formats have one zero point, and no minima.

    Args:
      codes: uint8 `[R, C]`.
      scale: `[R, C/group]`, of a float type.
      zero: integers like `scale`, or one for all.
      bits: width of the codes.
      group: columns that share a scale.
      symmetric: whether all zero points are said to be one. Where they are not, they are minima all
        the same; that others never are one keeps parts of a matrix alike.
    """
    zeros = np.asarray(zero, np.int32)
    zero_point = int(zeros.flat[0])
    minimum: Any = None
    # What the CPU kernels take as one zero point is a byte.
    if not (symmetric and 0 <= zero_point < 256 and np.all(zeros == zero_point)):
        zero_point, minimum = 0, -zeros.astype(np.float32) * scale.astype(np.float32)
    if bits <= 4 and group % 2 == 0:
        return QuantArray(
            halves(codes, group), scale, minimum, bits=4, zero_point=zero_point, group=group
        )
    signed = (codes ^ np.uint8(128)).view(np.int8)
    return QuantArray(signed, scale, minimum, bits=8, zero_point=zero_point - 128, group=group)


def four_bit_floats(codes: np.ndarray, scale: Any, factor: Any, group: int) -> QuantArray:
    """E2M1 codes uint8 `[..., C]` times `scale [..., C/group]`, and times `factor` if given."""
    return QuantArray(
        halves(codes, group), scale, super_scale=factor, bits=4, group=group, levels=E2M1
    )


def powers_of_two(exponents: np.ndarray) -> np.ndarray:
    """Scales `2**(e - 127)` of bytes, a view of type float8_e8m0fnu."""
    return exponents.view(ml_dtypes.float8_e8m0fnu)


def mxfp4(blocks: np.ndarray, scales: np.ndarray) -> QuantArray:
    """The matrices `[..., R, C]` of GPT-OSS's MXFP4 tensors.

    Args:
      blocks: uint8 `[..., R, C/32, 16]`: two neighbouring columns to a byte, the first one low.
      scales: uint8 `[..., R, C/32]`: exponents of powers of two, plus 127.
    """
    codes = neighbours(blocks).reshape(*scales.shape[:-1], -1)
    return four_bit_floats(codes, powers_of_two(scales), None, 32)
