"""Pallas kernels for TPUs."""

from .append import append
from .attention import attention, partial_attention
from .heads import head_matmul
from .integer import integer_grouped_matmul, integer_matmul
from .latent import latent_attention, partial_latent_attention
from .matmul import grouped_matmul, matmul
from .widen import why_unsupported

__all__ = [
    "append",
    "attention",
    "grouped_matmul",
    "head_matmul",
    "integer_grouped_matmul",
    "integer_matmul",
    "latent_attention",
    "matmul",
    "partial_attention",
    "partial_latent_attention",
    "why_unsupported",
]
