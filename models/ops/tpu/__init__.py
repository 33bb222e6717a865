"""Pallas kernels for TPUs."""

from .append import append
from .attention import attention
from .heads import head_matmul
from .latent import latent_attention
from .matmul import grouped_matmul, matmul
from .widen import why_unsupported

__all__ = [
    "append",
    "attention",
    "grouped_matmul",
    "head_matmul",
    "latent_attention",
    "matmul",
    "why_unsupported",
]
