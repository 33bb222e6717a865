"""The reference implementations: plain XLA, for every platform."""

from .attention import (
    attention,
    latent_attention,
    partial_attention,
    partial_latent_attention,
)
from .matmul import grouped_matmul, head_matmul, matmul, rows_of_groups
from .routing import combine, deal, route
from .sample import largest, sample

__all__ = [
    "attention",
    "combine",
    "deal",
    "grouped_matmul",
    "head_matmul",
    "largest",
    "latent_attention",
    "matmul",
    "partial_attention",
    "partial_latent_attention",
    "route",
    "rows_of_groups",
    "sample",
]
