"""Qwen3: Qwen2 with a norm on each head's queries and keys in place of the biases."""

from __future__ import annotations

from .family import Family
from .qwen2 import windows

QWEN3 = Family(
    name="qwen3",
    model_types=("qwen3",),
    architecture="qwen3",
    traits={"qk_norm": "head"},
    from_json=windows,
)
