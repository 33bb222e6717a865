"""The reference implementations: plain XLA, for every platform."""

from .attention import attention, latent_attention
from .matmul import grouped_matmul, head_matmul, matmul, rows_of_groups
from .routing import combine, deal, route
from .sample import largest, sample
from .shared_attention import shared_attention, shared_latent_attention

__all__ = [
    "attention",
    "combine",
    "deal",
    "grouped_matmul",
    "head_matmul",
    "largest",
    "latent_attention",
    "matmul",
    "route",
    "rows_of_groups",
    "sample",
    "shared_attention",
    "shared_latent_attention",
]
