"""Quantised weights for the CPU kernels: packed, or dense where their codes are floats."""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np

from ...host_arrays import Empty, aligned_empty
from ...quantized import QuantArray, dequantize
from .packed import PackedArray, can_pack, pack

#: Elements widened at a time.
_SLICE = 1 << 22
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def prepare(array: QuantArray, empty: Empty = aligned_empty) -> PackedArray | jax.Array:
    """Matrices `[..., R, C]` packed for the CPU kernels or, where `can_pack` is False, dense.

    Both hold exactly what `dequantize` gives. Products of 8-bit floats and scales fit bfloat16 only
    where scales are powers of two or nearly so; otherwise the dense matrix is float32.

    Args:
      array: of NumPy leaves.
      empty: makes the buffers of the result.
    """
    return pack(array, empty) if can_pack(array) else jax.device_put(_widen(array, empty))


def _widen(array: QuantArray, empty: Empty) -> np.ndarray:
    """The dense matrix, bfloat16 if that is exact, a slice of rows at a time."""
    shape = array.shape
    array = jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), array)
    rows, columns = array.shape
    wide = empty((rows, columns), np.dtype(np.float32))
    exact = True
    step = max(1, _SLICE // columns)
    for start in range(0, rows, step):
        part: Any = jax.tree.map(lambda leaf, at=start: leaf[at : at + step], array)
        values = np.asarray(dequantize(part))
        exact = exact and np.array_equal(values.astype(_BFLOAT16), values, equal_nan=True)
        wide[start : start + step] = values
    if not exact:
        return wide.reshape(shape)
    narrow = empty((rows, columns), _BFLOAT16)
    narrow[...] = wide
    return narrow.reshape(shape)
