"""NumPy buffers that JAX on CPU takes over without copying them."""

from __future__ import annotations

import math
import mmap
import os
import threading
from collections.abc import Callable

import numpy as np

#: Makes an uninitialised array of a shape and type.
Empty = Callable[[tuple[int, ...], np.dtype], np.ndarray]

#: Bytes that XLA wants its buffers aligned to.
_ALIGNMENT = 64
#: What `Arena` asks the system for at once; untouched parts of it take no memory.
_SLAB_BYTES = 64 << 20


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array whose data JAX on CPU can adopt without a copy."""
    size = math.prod(shape) * dtype.itemsize
    return _carve(np.empty(size + _ALIGNMENT, np.uint8), shape, dtype)


class Arena:
    """Arrays like those of `aligned_empty`, side by side in few large pieces of memory.

    The pieces ask for the system's huge pages (2 MB): a decode step reads each weight once, and
    translating addresses costs it a few percent of its time. A piece lives as long as any array in
    it. Threads may share an arena.
    """

    def __init__(self) -> None:
        self._left = np.empty(0, np.uint8)
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An uninitialised array."""
        with self._lock:
            return self._next(shape, dtype)

    def _next(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        needed = math.prod(shape) * dtype.itemsize + _ALIGNMENT
        if needed > len(self._left):
            # Private memory: shared mappings get no huge pages.
            private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if os.name == "posix" else {}
            slab = mmap.mmap(-1, max(needed, _SLAB_BYTES), **private)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                slab.madvise(mmap.MADV_HUGEPAGE)
            self._left = np.frombuffer(slab, np.uint8)
        array = _carve(self._left, shape, dtype)
        self._left = self._left[needed:]
        return array


def _carve(raw: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """The array at the first aligned byte of `raw`."""
    start = -raw.ctypes.data % _ALIGNMENT
    size = math.prod(shape) * dtype.itemsize
    return raw[start : start + size].view(dtype).reshape(shape)
