"""The arithmetic of the decoder. `Kernels` chooses who does it; the answers agree.

`xla/` is the reference and runs anywhere; `cpu/` are compiled kernels for the CPU.
"""

from .dispatch import (
    attention,
    embed,
    gated_matmul,
    largest,
    logsumexp,
    matmul,
    products,
    sample,
)
from .elementwise import rotary_tables
from .layout import Layout
from .sampling import Sampling, uniforms

__all__ = [
    "Layout",
    "Sampling",
    "attention",
    "embed",
    "gated_matmul",
    "largest",
    "logsumexp",
    "matmul",
    "products",
    "rotary_tables",
    "sample",
    "uniforms",
]
