"""The arithmetic peak of this processor, measured on registers."""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor

from .library import ISAS, Library

_ROUNDS = 1_000_000


def peak_operations(library: Library, activations: str, threads: int, repeats: int = 3) -> float:
    """Operations per second that `threads` threads reach on registers, two to a multiply-add.

    Args:
      library: the compiled kernels.
      activations: "int8" for products of bytes, "float32" for those of floats.
      threads: as many as the kernels use.
      repeats: of which the best counts; about 10 ms each.

    Returns:
      0 where the instruction set in use has no such measurement.
    """
    run = ctypes.CDLL(str(library.path)).stoker_peak
    run.restype = ctypes.c_int64
    run.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int)
    isa = ISAS.index(library.best)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            start = time.perf_counter()
            tasks = [
                pool.submit(run, isa, activations == "int8", _ROUNDS, 1) for _ in range(threads)
            ]
            done = sum(task.result() for task in tasks)
            best = max(best, done / (time.perf_counter() - start))
    return best
