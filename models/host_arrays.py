"""NumPy buffers that JAX on CPU takes over without copying them."""

from __future__ import annotations

import math

import numpy as np

#: Bytes that XLA wants its buffers aligned to.
_ALIGNMENT = 64


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array whose data JAX on CPU can adopt without a copy."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
