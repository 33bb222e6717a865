"""The KV cache: a pool of pages per layer, and the layout of its bytes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..models.config import ModelConfig
from ..models.pages import PageArray, layer_pages, layer_token_bytes
from ..models.transformer import LayerCache
from ..sharding import sharding
from .pages import PAGE_TOKENS

#: The arrays of pages of each layer, as `models/pages.py` describes them: separate buffers, so that
#: donating them lets every step write in place.
Cache = tuple[LayerCache, ...]


def new_cache(
    config: ModelConfig,
    n_pages: int,
    page_tokens: int = PAGE_TOKENS,
    mesh: jax.sharding.Mesh | None = None,
) -> Cache:
    """A zeroed cache of `n_pages` usable pages, besides the dump page, in `config.kv_dtype`.

    On a mesh, each array is split as its logical axes say.
    """

    def zeros(pages: PageArray) -> jax.Array:
        shape = (n_pages + 1, *pages.shape)
        placement = None if mesh is None else sharding(pages.axes, shape, mesh)
        return jnp.zeros(shape, config.cache_dtype, device=placement)

    return tuple(
        tuple(zeros(pages) for pages in layer_pages(config, page_tokens))
        for _ in range(config.n_layers)
    )


def token_bytes(config: ModelConfig) -> int:
    """Bytes that one token takes over all layers."""
    return config.n_layers * layer_token_bytes(config)
