"""The KV cache: a pool of pages per layer, and the layout of its bytes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from ..models.config import ModelConfig
from ..models.transformer import LayerCache
from .pages import PAGE_TOKENS

#: Logical axes of key and value pages.
CACHE_AXES = {
    "k": ("pages", "kv_heads", None, "context"),
    "v": ("pages", "kv_heads", "context", None),
}
#: Key pages `[P, K, H, Z]` and value pages `[P, K, Z, H]` of each layer: separate buffers, so that
#: donating them lets every step write in place. Keys of neighbouring tokens lie together, since a
#: query meets them element by element; values token by token, since they are added up so.
Cache = tuple[LayerCache, ...]


def new_cache(
    config: ModelConfig,
    n_pages: int,
    page_tokens: int = PAGE_TOKENS,
    mesh: jax.sharding.Mesh | None = None,
) -> Cache:
    """A zeroed cache of `n_pages` usable pages, besides the dump page, in `config.kv_dtype`.

    On a mesh, each part of its `data` axis has so many pages of its own, numbered alike; devices
    along its `sequence` axis have `page_tokens` of every page each; and KV heads lie where the
    projections that fill them do. Each device gets its part, and no other memory is used.
    """
    split, heads = config.split, config.heads
    pages = (n_pages + 1) * split.degree("pages")
    Z = page_tokens * split.degree("context")
    shapes = {"k": (config.head_dim, Z), "v": (Z, config.head_dim)}

    def buffer(name: str) -> jax.Array:
        placement = None if mesh is None else NamedSharding(mesh, split.spec(CACHE_AXES[name]))
        shape = (pages, heads.kv.padded, *shapes[name])
        return jnp.zeros(shape, config.cache_dtype, device=placement)

    return tuple((buffer("k"), buffer("v")) for _ in range(config.n_layers))


def token_bytes(config: ModelConfig) -> int:
    """Bytes that one token's keys and values take over all layers, padding and copies left out."""
    width = config.n_kv_heads * config.head_dim
    return 2 * config.n_layers * width * config.cache_dtype.itemsize


def page_bytes(config: ModelConfig, page_tokens: int = PAGE_TOKENS) -> int:
    """Bytes of one page over all layers, on each device: of `page_tokens` tokens and its heads."""
    width = config.heads.kv.width * config.head_dim
    return 2 * config.n_layers * width * config.cache_dtype.itemsize * page_tokens
