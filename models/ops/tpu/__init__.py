"""Pallas kernels for TPUs."""

from .append import append
from .attention import attention, partial_attention
from .matmul import grouped_matmul, matmul
from .widen import why_unsupported

__all__ = [
    "append",
    "attention",
    "grouped_matmul",
    "matmul",
    "partial_attention",
    "why_unsupported",
]
