"""Pallas kernels for TPUs."""

from .append import append
from .attention import attention
from .integer import integer_grouped_matmul, integer_matmul
from .matmul import grouped_matmul, matmul
from .widen import why_unsupported

__all__ = [
    "append",
    "attention",
    "grouped_matmul",
    "integer_grouped_matmul",
    "integer_matmul",
    "matmul",
    "why_unsupported",
]
