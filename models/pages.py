"""What a layer keeps of each token, and how pages hold it."""

from __future__ import annotations

import dataclasses
import math

from .config import ModelConfig


@dataclasses.dataclass(frozen=True)
class PageArray:
    """One array of pages, without its values.

    Attributes:
      shape: of a page of Z tokens; the array has P of them, `[P, *shape]`.
      axes: a logical axis name for each axis of the array (see `sharding/rules.py`).
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]


def layer_pages(config: ModelConfig, page_tokens: int) -> tuple[PageArray, ...]:
    """The arrays that one layer keeps: everything about the cache's bytes follows from this.

    Keys of neighbouring tokens lie together, `[P, K, H, Z]`, since a query meets them element by
    element; values token by token, `[P, K, Z, H]`, since they are added up so. They are split over
    devices as the projections that fill them. Latent attention keeps one vector for each token,
    key and value of all heads, `[P, Z, W]`, which every device needs.
    """
    Z, H, K = page_tokens, config.head_dim, config.n_kv_heads
    if config.latent is not None:
        return (PageArray((Z, config.latent.width), ("pages", "context", None)),)
    return (
        PageArray((K, H, Z), ("pages", "kv_heads", None, "context")),
        PageArray((K, Z, H), ("pages", "kv_heads", "context", None)),
    )


def layer_token_bytes(config: ModelConfig) -> int:
    """Bytes that one token takes in one layer."""
    elements = sum(math.prod(pages.shape) for pages in layer_pages(config, 1))
    return elements * config.cache_dtype.itemsize
