"""Pallas kernels for GPUs, compiled by Triton."""

from .attention import attention
from .heads import head_matmul
from .latent import latent_attention
from .matmul import grouped_matmul, matmul, why_unsupported

__all__ = [
    "attention",
    "grouped_matmul",
    "head_matmul",
    "latent_attention",
    "matmul",
    "why_unsupported",
]
