"""Llama 2 to 3.2 and what shares its architecture (SmolLM2, TinyLlama, ...)."""

from __future__ import annotations

from .family import Family
from .mixtral import experts_of_keys
from .naming import gguf_naming

# The GGUF converter reorders Q and K rows so that rotated pairs are neighbours.
LLAMA = Family(
    name="llama",
    model_types=("llama",),
    architecture="llama",
    gguf=gguf_naming(paired=True),
    from_keys=experts_of_keys,
)
