"""How a process that serves keeps its memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator

#: Numbers of glibc's mallopt (malloc.h): keep this much spare at the end of the heap, give back no
#: less, and serve blocks below the third from the heap.
_SETTINGS = {-2: 64 << 20, -1: 1 << 30, -3: 32 << 20}


def keep_freed_memory() -> None:
    """Lets glibc keep the buffers that a step frees, for the next step to use.

    By default it gives them back to the system, and a step over 32 sequences then takes 3,000 page
    faults for its logits alone, a fifth of its time. Elsewhere than on glibc this does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in _SETTINGS.items():
            mallopt(parameter, value)


@contextlib.contextmanager
def made_to_last() -> Iterator[None]:
    """For what is made inside and never becomes garbage, such as modules: Python does not look for
    any meanwhile, nor in it afterwards.

    JAX and what is imported with it are 130,000 objects; to look through them again and again took
    a fifth of the time from a command to its first token.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
