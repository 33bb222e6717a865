"""Llama and what shares its architecture (SmolLM2, Mistral, TinyLlama, ...)."""

from __future__ import annotations

from .family import BIAS_TENSORS, DECODER_TENSORS, Family

# The converter reorders Q and K rows so that rotated pairs are neighbours.
LLAMA = Family(
    name="llama",
    architecture="llama",
    tensors={**DECODER_TENSORS, **BIAS_TENSORS},
    paired_rows=("q", "k", "q_bias", "k_bias"),
)
