"""The KV cache: a pool of pages per layer, and the layout of its bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from ..models.config import ModelConfig
from ..models.pages import PageArray, layer_pages, layer_token_bytes
from ..models.pages import page_tokens as tokens_of_page
from ..models.transformer import LayerCache

#: The arrays of pages of each layer, as `models/pages.py` describes them: separate buffers, so that
#: donating them lets every step write in place.
Cache = tuple[LayerCache, ...]


def new_cache(
    config: ModelConfig,
    n_pages: int,
    page_tokens: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Cache:
    """A zeroed cache of `n_pages` usable pages, besides the dump page, in `config.kv_dtype`.

    Pages hold `page_tokens`, or what suits `config.kernels`.

    On a mesh, each part of its `data` axis has so many pages of its own, numbered alike; devices
    along its `sequence` axis have `page_tokens` of every page each; and KV heads lie where the
    projections that fill them do. Each device gets its part, and no other memory is used.
    """
    split = config.split

    def size(pages: PageArray) -> tuple[int, ...]:
        sizes = [n_pages + 1, *pages.shape]
        for at, name in enumerate(pages.axes):
            if name == "kv_heads":
                sizes[at] = config.heads.kv.padded
            elif name is not None:
                sizes[at] *= split.degree(name)
        return tuple(sizes)

    def place(pages: PageArray) -> NamedSharding | None:
        return None if mesh is None else NamedSharding(mesh, split.spec(pages.axes))

    page_tokens = page_tokens or tokens_of_page(config.kernels)
    layer = [
        _zeros(size(pages), pages.dtype, place(pages)) for pages in layer_pages(config, page_tokens)
    ]
    return tuple(tuple(zeros() for zeros in layer) for _ in range(config.n_layers))


@functools.lru_cache
def _zeros(
    shape: tuple[int, ...], dtype: DTypeLike, place: NamedSharding | None
) -> Callable[[], jax.Array]:
    """Makes such an array: one small program, where `jnp.zeros` compiles two."""
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=place)


def token_bytes(config: ModelConfig) -> int:
    """Bytes that one token takes over all layers, padding and copies of a mesh left out."""
    return config.n_layers * layer_token_bytes(config)


def page_bytes(config: ModelConfig, page_tokens: int | None = None) -> int:
    """Bytes of one page over all layers, on each device: of `page_tokens` tokens and its heads."""
    size = 0
    for pages in layer_pages(config, page_tokens or tokens_of_page(config.kernels)):
        own = pages.nbytes
        if "kv_heads" in pages.axes:
            own = own // config.n_kv_heads * config.heads.kv.width
        size += own
    return config.n_layers * size
