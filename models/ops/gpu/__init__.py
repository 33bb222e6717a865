"""Pallas kernels for GPUs, compiled by Triton."""

from .attention import attention, partial_attention
from .matmul import grouped_matmul, matmul, why_unsupported

__all__ = ["attention", "grouped_matmul", "matmul", "partial_attention", "why_unsupported"]
