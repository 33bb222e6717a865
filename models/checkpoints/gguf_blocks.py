"""GGUF tensor blocks as arrays, without loss: dense ones as they are, quantised as `QuantArray`.

A block holds its scale and codes together; here every leaf becomes an array of its own, with codes
in the order of columns. Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from ..errors import StokerError
from ..host_arrays import aligned_empty
from ..quantized import E2M1, QuantArray
from .gguf_header import TensorInfo

Leaves = dict[str, np.ndarray]

#: Raw bytes that are unpacked at a time, which bounds the temporaries.
CHUNK_BYTES = 4 << 20


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of each block, `[R, blocks]`."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0]


def _words(values: np.ndarray, width: int) -> np.ndarray:
    """Bytes `[R, blocks, n]` as words `[rows, width / size]`, eight or four bytes to a word.

    NumPy takes as long for a byte as for a word, and much longer for rows that are short.
    """
    kind = np.dtype(np.uint64 if width % 8 == 0 else np.uint32)
    return np.ascontiguousarray(values).view(kind).reshape(-1, width // kind.itemsize)


def _each(words: np.ndarray, byte: int) -> int:
    """A word of `byte`s."""
    return int.from_bytes(bytes([byte] * words.itemsize), "little")


def _fields(values: np.ndarray, run: int, shifts: Sequence[int], mask: int) -> np.ndarray:
    """Bit fields `[R, blocks, n]`: of each run of bytes, first the fields at the first shift."""
    words = _words(values, run)
    fields = np.empty((len(words), len(shifts), words.shape[-1]), words.dtype)
    for index, shift in enumerate(shifts):
        fields[:, index] = words >> shift & _each(words, mask)
    return fields.view(np.uint8).reshape(*values.shape[:2], -1)


def _nibbles(values: np.ndarray, run: int) -> np.ndarray:
    return _fields(values, run, (0, 4), 15)


def _pack(codes: np.ndarray, group: int) -> np.ndarray:
    """4-bit codes `[R, blocks, n]` as the bytes of `QuantArray.codes`, `[R, blocks, n/2]`."""
    words = _words(codes, group // 2)
    packed = words[::2] | words[1::2] << 4
    return packed.view(np.uint8).reshape(*codes.shape[:2], -1)


def _q4_0(blocks: np.ndarray) -> Leaves:
    return {"codes": blocks[..., 2:], "scale": _half(blocks, 0)}


def _q4_1(blocks: np.ndarray) -> Leaves:
    return {"codes": blocks[..., 4:], "scale": _half(blocks, 0), "minimum": _half(blocks, 2)}


def _q5(blocks: np.ndarray, at: int) -> np.ndarray:
    """5-bit codes: the high bits in 4 bytes at `at`, then the low ones."""
    high = np.unpackbits(blocks[..., at : at + 4], axis=-1, bitorder="little")
    return (_nibbles(blocks[..., at + 4 :], 16) | high << np.uint8(4)).view(np.int8)


def _q5_0(blocks: np.ndarray) -> Leaves:
    return {"codes": _q5(blocks, 2) - np.int8(16), "scale": _half(blocks, 0)}


def _q5_1(blocks: np.ndarray) -> Leaves:
    return {"codes": _q5(blocks, 4), "scale": _half(blocks, 0), "minimum": _half(blocks, 2)}


def _q8_0(blocks: np.ndarray) -> Leaves:
    return {"codes": blocks[..., 2:].view(np.int8), "scale": _half(blocks, 0)}


def _q2_k(blocks: np.ndarray) -> Leaves:
    return {
        "codes": _pack(_fields(blocks[..., 16:80], 32, (0, 2, 4, 6), 3), 16),
        "scale": blocks[..., :16] & np.uint8(15),
        "minimum": blocks[..., :16] >> np.uint8(4),
        "super_scale": _half(blocks, 80),
        "super_minimum": -_half(blocks, 82),
    }


def _q3_k(blocks: np.ndarray) -> Leaves:
    high = _fields(blocks[..., :32], 32, range(8), 1)
    codes = _fields(blocks[..., 32:96], 32, (0, 2, 4, 6), 3) | high << np.uint8(2)
    low = _nibbles(blocks[..., 96:104], 8)
    scale = low | _fields(blocks[..., 104:108], 4, (0, 2, 4, 6), 3) << np.uint8(4)
    return {
        "codes": _pack(codes, 16),
        "scale": scale.view(np.int8) - np.int8(32),
        "super_scale": _half(blocks, 108),
    }


def _minima(blocks: np.ndarray) -> Leaves:
    """Scales and minima of Q4_K and Q5_K: eight of each, 6 bits wide, in bytes 4 to 15."""
    scale, minimum, rest = _words(blocks[..., 4:16], 4).reshape(-1, 3).T
    low, six, high = 0x0F0F0F0F, 0x3F3F3F3F, 0x30303030
    found = {
        "scale": (scale & six, rest & low | scale >> 2 & high),
        "minimum": (minimum & six, rest >> 4 & low | minimum >> 2 & high),
    }
    leaves = {
        name: np.stack(words, axis=-1).view(np.uint8).reshape(*blocks.shape[:2], 8)
        for name, words in found.items()
    }
    return leaves | {"super_scale": _half(blocks, 0), "super_minimum": -_half(blocks, 2)}


def _q4_k(blocks: np.ndarray) -> Leaves:
    return {"codes": _pack(_nibbles(blocks[..., 16:], 32), 32), **_minima(blocks)}


def _q5_k(blocks: np.ndarray) -> Leaves:
    high = _fields(blocks[..., 16:48], 32, range(8), 1)
    codes = _nibbles(blocks[..., 48:], 32) | high << np.uint8(4)
    return {"codes": codes.view(np.int8), **_minima(blocks)}


def _q6_k(blocks: np.ndarray) -> Leaves:
    high = _fields(blocks[..., 128:192], 32, (0, 2, 4, 6), 3)
    codes = _nibbles(blocks[..., :128], 64) | high << np.uint8(4)
    return {
        "codes": codes.view(np.int8) - np.int8(32),
        "scale": blocks[..., 192:208].view(np.int8),
        "super_scale": _half(blocks, 208),
    }


def _mxfp4(blocks: np.ndarray) -> Leaves:
    return {"codes": blocks[..., 1:], "scale": blocks[..., :1].view(ml_dtypes.float8_e8m0fnu)}


@dataclasses.dataclass(frozen=True)
class _Format:
    """How one block type becomes the leaves of a `QuantArray`."""

    unpack: Callable[[np.ndarray], Leaves]
    bits: int
    zero_point: int = 0
    group: int = 32
    levels: tuple[float, ...] = ()


_DENSE: dict[GGMLQuantizationType, np.dtype] = {
    GGMLQuantizationType.F32: np.dtype("<f4"),
    GGMLQuantizationType.F16: np.dtype("<f2"),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
_QUANTISED: dict[GGMLQuantizationType, _Format] = {
    GGMLQuantizationType.Q4_0: _Format(_q4_0, 4, zero_point=8),
    GGMLQuantizationType.Q4_1: _Format(_q4_1, 4),
    GGMLQuantizationType.Q5_0: _Format(_q5_0, 8),
    GGMLQuantizationType.Q5_1: _Format(_q5_1, 8),
    GGMLQuantizationType.Q8_0: _Format(_q8_0, 8),
    GGMLQuantizationType.Q2_K: _Format(_q2_k, 4, group=16),
    GGMLQuantizationType.Q3_K: _Format(_q3_k, 4, zero_point=4, group=16),
    GGMLQuantizationType.Q4_K: _Format(_q4_k, 4),
    GGMLQuantizationType.Q5_K: _Format(_q5_k, 8),
    GGMLQuantizationType.Q6_K: _Format(_q6_k, 8, group=16),
    GGMLQuantizationType.MXFP4: _Format(_mxfp4, 4, levels=E2M1),
}
#: Names of the tensor types that `convert` takes.
SUPPORTED_TYPES = tuple(kind.name for kind in (*_DENSE, *_QUANTISED))


def check_types(tensors: Iterable[TensorInfo]) -> None:
    """Raises `StokerError` for the first tensor whose type `convert` cannot take."""
    for info in tensors:
        if info.type.name not in SUPPORTED_TYPES:
            raise StokerError(
                f"tensor '{info.name}' has type {info.type.name}, which is not supported; give a "
                f"file of {', '.join(SUPPORTED_TYPES)}"
            )


def blocks_of(raw: np.ndarray, info: TensorInfo) -> np.ndarray:
    """The blocks `[..., C/unit, bytes]` in the file bytes `raw` (uint8, flat) of a tensor."""
    block, block_bytes = GGML_QUANT_SIZES[info.type]
    return raw.reshape(*info.shape[:-1], info.shape[-1] // block, block_bytes)


def convert(blocks: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray | QuantArray:
    """The values of blocks, uint8 `[..., n, bytes]`, in NumPy arrays of their own.

    F32, F16 and BF16 keep their type. Quantised types become a `QuantArray` that `dequantize` turns
    into exactly the values that the blocks stand for. They are unpacked a few rows at a time, so
    temporaries stay near `CHUNK_BYTES` whatever the tensor's size.
    """
    if kind in _DENSE:
        dense = aligned_empty(blocks.shape[:-1], _DENSE[kind])
        dense.view(np.uint8).reshape(blocks.shape)[...] = blocks
        return dense
    form = _QUANTISED[kind]
    *lead, count, block_bytes = blocks.shape
    flat = blocks.reshape(-1, count, block_bytes)
    rows = max(1, CHUNK_BYTES // (count * block_bytes))
    leaves: Leaves = {}
    for start in range(0, len(flat), rows):
        for name, part in form.unpack(flat[start : start + rows]).items():
            part = part.reshape(len(part), -1)
            if name not in leaves:
                leaves[name] = aligned_empty((len(flat), part.shape[1]), part.dtype)
            leaves[name][start : start + rows] = part
    fields: dict[str, Any] = {name: leaf.reshape(*lead, -1) for name, leaf in leaves.items()}
    for name in ("bits", "zero_point", "group", "levels"):
        fields[name] = getattr(form, name)
    return QuantArray(**fields)
