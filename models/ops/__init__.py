"""The arithmetic of the decoder. `Kernels` chooses who does it; the answers agree.

`xla/` is the reference and runs anywhere; `cpu/` are compiled kernels for the CPU; `tpu/` and
`gpu/` are Pallas kernels. `choices` tells who does what.
"""

from .choices import Choice, choices
from .dispatch import (
    AnyWeight,
    attention,
    embed,
    gated_matmul,
    grouped_gated_matmul,
    grouped_products,
    head_matmul,
    largest,
    latent_attention,
    logsumexp,
    matmul,
    products,
    rms_norm,
    sample,
)
from .elementwise import gated, rotary_tables, softcap
from .layout import Layout
from .mixture import combine, deal, route
from .quant_pages import Pages, QuantPages, pack_pages
from .sampling import Sampling, uniforms
from .shared_attention import shared_attention, shared_latent_attention

__all__ = [
    "AnyWeight",
    "Choice",
    "Layout",
    "Pages",
    "QuantPages",
    "Sampling",
    "attention",
    "choices",
    "combine",
    "deal",
    "embed",
    "gated",
    "gated_matmul",
    "grouped_gated_matmul",
    "grouped_products",
    "head_matmul",
    "largest",
    "latent_attention",
    "logsumexp",
    "matmul",
    "pack_pages",
    "products",
    "rms_norm",
    "rotary_tables",
    "route",
    "sample",
    "shared_attention",
    "shared_latent_attention",
    "softcap",
    "uniforms",
]
