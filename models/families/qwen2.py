"""Qwen2 and Qwen2.5: Llama with biases on Q, K and V, and rows in their original order."""

from __future__ import annotations

from .family import BIAS_TENSORS, DECODER_TENSORS, Family

QWEN2 = Family(name="qwen2", architecture="qwen2", tensors={**DECODER_TENSORS, **BIAS_TENSORS})
