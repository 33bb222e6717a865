"""How many pages a cache gets."""

from __future__ import annotations

import re
from pathlib import Path

import jax

from ..models.config import ModelConfig
from ..models.errors import StokerError
from ..models.pages import whole_page_tokens
from .cache import page_bytes as bytes_of_page
from .pages import pages_for

#: Share of the memory that is free once the weights are there, which a cache takes at most.
HOST_SHARE, DEVICE_SHARE = 0.25, 0.8


def choose_pages(
    config: ModelConfig, slots: int, context: int, pages: int | None, kv_bytes: int | None
) -> int:
    """Usable pages of an engine's cache.

    What was asked for, or else enough for every slot to be full, but no more than `kv_bytes`, or
    than a share of the free memory if that is None. On a mesh, slots and pages are those of one
    part of its data axis, and bytes those of one device.

    Raises:
      StokerError: if one sequence of `context` tokens does not fit, the slots outnumber the pages,
        or memory does not suffice; with the numbers.
    """
    page_bytes = bytes_of_page(config)
    page_tokens = whole_page_tokens(config)
    one = pages_for(context, page_tokens)
    free, share = _free_memory()
    if pages is not None and kv_bytes is not None:
        raise StokerError("pages and kv_bytes both size the cache; give one of them")
    if pages is None:
        limit = share if kv_bytes is None else kv_bytes
        pages = slots * one if limit is None else min(slots * one, limit // page_bytes)
    if pages < one:
        raise StokerError(
            f"a sequence of {context} tokens takes {one} pages of {page_tokens} tokens "
            f"({one * page_bytes:,} bytes), but the cache has {max(pages, 0)}; give it more pages "
            "or memory, or a shorter context"
        )
    if pages < slots:
        raise StokerError(
            f"{slots} slots would share {pages} pages, and each needs at least one; give fewer "
            "slots, or the cache more pages or memory"
        )
    if free is not None and pages * page_bytes > free:
        raise StokerError(
            f"out of memory: a KV cache of {pages} pages takes {pages * page_bytes:,} bytes, but "
            f"{free:,} are free; give it fewer pages"
        )
    return pages


def _free_memory() -> tuple[int | None, int | None]:
    """Bytes that are free, and how many of them a cache takes by default.

    None where the platform does not say.
    """
    device = jax.devices()[0]
    if device.platform != "cpu":
        memory = device.memory_stats() or {}
        if "bytes_limit" not in memory:
            return None, None
        free = memory["bytes_limit"] - memory.get("bytes_in_use", 0)
        return free, int(DEVICE_SHARE * free)
    meminfo = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+)", meminfo.read_text()) if meminfo.exists() else None
    if found is None:
        return None, None
    # Where one host stands for several devices, they share its memory.
    free = int(found[1]) * 1024 // jax.local_device_count()
    return free, int(HOST_SHARE * free)
