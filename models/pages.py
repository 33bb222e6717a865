"""What a layer keeps of each token, and how pages hold it."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from .config import Kernels, ModelConfig
from .ops.quant_pages import tpu_values_by_token


@dataclasses.dataclass(frozen=True)
class PageArray:
    """One array of pages, without its values.

    Attributes:
      shape: of a page of Z tokens; the array has P of them, `[P, *shape]`.
      dtype: of its elements.
      axes: a logical axis name for each axis of the array (see `sharding/rules.py`).
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: jnp.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of a page."""
        return math.prod(self.shape) * self.dtype.itemsize


#: Tokens of a page (Z) by the kernels that read it. The CPU takes 16 keys at once, and small pages
#: share prefixes best; a TPU's memory is tiled by 128 lanes; Triton's products take 64 keys well.
_PAGE_TOKENS = {"xla": 16, "cpu": 16, "tpu": 128, "gpu": 64}


def page_tokens(kernels: Kernels) -> int:
    """Tokens that a device's pages hold (Z)."""
    return _PAGE_TOKENS[kernels.platform]


def whole_page_tokens(config: ModelConfig) -> int:
    """Tokens of a page: as many as the devices that share a context hold of it together."""
    return page_tokens(config.kernels) * config.split.degree("context")


def values_by_token(config: ModelConfig) -> bool:
    """Whether value pages are `[P, K, Z, H]`; else they are laid out as keys are."""
    return config.kernels.platform != "tpu" or tpu_values_by_token(config.head_dim)


def layer_pages(config: ModelConfig, page_tokens: int) -> tuple[PageArray, ...]:
    """The arrays that one layer keeps: everything about the cache's bytes follows from this.

    Keys of neighbouring tokens lie together, `[P, K, H, Z]`, since a query meets them element by
    element; values token by token, `[P, K, Z, H]`, since they are added up so, but for
    `values_by_token`. They are split over devices as the projections that fill them. In int8 each
    is followed by its scales, float32 `[P, K, Z]` (see `ops.QuantPages`). Latent attention keeps
    one vector for each token, key and value of all heads, `[P, Z, W]`, which every device needs; on
    TPUs with zeros after it, up to whole lanes: XLA would lay narrower pages out by token for its
    arguments, and copy them all in every step.
    """
    dtype = config.cache_dtype
    Z, H, K = page_tokens, config.head_dim, config.n_kv_heads
    if config.latent is not None:
        lanes = 128 if config.kernels.platform == "tpu" else 1
        width = -(-config.latent.width // lanes) * lanes
        return (PageArray((Z, width), ("pages", "context", None), dtype),)
    keys = values = PageArray((K, H, Z), ("pages", "kv_heads", None, "context"), dtype)
    if values_by_token(config):
        values = PageArray((K, Z, H), ("pages", "kv_heads", "context", None), dtype)
    if dtype != jnp.int8:
        return keys, values
    scales = PageArray((K, Z), ("pages", "kv_heads", "context"), jnp.dtype("float32"))
    return keys, scales, values, scales


def layer_token_bytes(config: ModelConfig) -> int:
    """Bytes that one token takes in one layer."""
    return sum(pages.nbytes for pages in layer_pages(config, 1))
