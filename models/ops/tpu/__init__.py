"""Pallas kernels for TPUs."""

from .append import append, value_shape
from .attention import attention
from .matmul import grouped_matmul, matmul
from .widen import ready, why_unsupported

__all__ = [
    "append",
    "attention",
    "grouped_matmul",
    "matmul",
    "ready",
    "value_shape",
    "why_unsupported",
]
