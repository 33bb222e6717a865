"""The KV cache: a pool of pages per layer, and the layout of its bytes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..models.config import ModelConfig
from ..models.transformer import LayerCache
from ..sharding import sharding
from .pages import PAGE_TOKENS

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

    On a mesh, KV heads are split as the projections that fill them.
    """
    heads = (n_pages + 1, config.n_kv_heads)
    placement = None
    if mesh is not None:
        placement = sharding((None, "kv_heads", None, None), (*heads, 1, 1), mesh)

    def pages(*shape: int) -> jax.Array:
        return jnp.zeros((*heads, *shape), config.cache_dtype, device=placement)

    Z, H = page_tokens, config.head_dim
    return tuple((pages(H, Z), pages(Z, H)) for _ in range(config.n_layers))


def token_bytes(config: ModelConfig) -> int:
    """Bytes that one token's keys and values take over all layers."""
    width = config.n_kv_heads * config.head_dim
    return 2 * config.n_layers * width * config.cache_dtype.itemsize
