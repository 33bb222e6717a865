"""Pallas kernels for GPUs, compiled by Triton."""

from .attention import attention

__all__ = ["attention"]
