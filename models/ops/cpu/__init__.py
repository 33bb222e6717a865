"""C++ kernels for the CPU, called through XLA's foreign-function interface."""

from .attention import attention, partial_attention
from .grouped import grouped_gated_matmul, grouped_products
from .latent import latent_attention, partial_latent_attention
from .library import ISAS, Library, load, why_unavailable
from .matmul import gated_matmul, matmul, products
from .packed import PackedArray, can_pack, pack, unpack
from .peak import peak_operations
from .prepare import prepare
from .routing import combine, deal, rms_norm, route
from .sample import largest, logsumexp, sample

__all__ = [
    "ISAS",
    "Library",
    "PackedArray",
    "attention",
    "can_pack",
    "combine",
    "deal",
    "gated_matmul",
    "grouped_gated_matmul",
    "grouped_products",
    "largest",
    "latent_attention",
    "load",
    "logsumexp",
    "matmul",
    "pack",
    "partial_attention",
    "partial_latent_attention",
    "peak_operations",
    "prepare",
    "products",
    "rms_norm",
    "route",
    "sample",
    "unpack",
    "why_unavailable",
]
