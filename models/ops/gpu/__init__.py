"""Pallas kernels for GPUs, compiled by Triton."""

from .attention import attention
from .integer import integer_grouped_matmul, integer_matmul
from .matmul import grouped_matmul, matmul, why_unsupported

__all__ = [
    "attention",
    "grouped_matmul",
    "integer_grouped_matmul",
    "integer_matmul",
    "matmul",
    "why_unsupported",
]
