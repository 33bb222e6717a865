"""Work of the host's processors on several arrays at once, within memory."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

#: More threads than this wait for each other and for the disk.
_MOST_THREADS = 8
#: Bytes that may be at work together even where no item is as large.
_ROOM = 32 << 20


def usable_cores() -> int:
    """Cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def at_once(
    work: Callable[[T], R],
    items: Sequence[T],
    sizes: Sequence[int],
    threads: int | None = None,
    room: int = _ROOM,
) -> Iterator[R]:
    """Yields `work(item)` of each item, in their order, while threads work on the next ones.

    Those that are begun and not yet yielded have no more bytes together than the largest has alone,
    or `room` where that is more. After an error nothing more is begun, but what is at work goes on
    to its end before the error is raised.

    Args:
      work: called by several threads; NumPy lets them run beside each other.
      items: what to work on.
      sizes: bytes that each item counts for.
      threads: that work; None: one for each usable core, up to eight.
      room: see above.
    """
    threads = threads or min(usable_cores(), _MOST_THREADS)
    if threads == 1:
        yield from map(work, items)
        return
    room = max([room, *sizes])
    begun: collections.deque[tuple[int, Future[R]]] = collections.deque()
    taken = 0
    failed = len(items)

    def attempt(index: int, item: T) -> R:
        nonlocal failed
        if index > failed:
            raise CancelledError  # nobody asks for it: the error comes first
        try:
            return work(item)
        except BaseException:
            failed = min(failed, index)
            raise

    pool = ThreadPoolExecutor(threads)
    try:
        for index, (item, size) in enumerate(zip(items, sizes, strict=True)):
            while begun and (taken + size > room or len(begun) == 2 * threads):
                oldest, result = begun.popleft()
                yield result.result()
                taken -= oldest
            begun.append((size, pool.submit(attempt, index, item)))
            taken += size
        for _, result in begun:
            yield result.result()
    finally:
        pool.shutdown(cancel_futures=True)
