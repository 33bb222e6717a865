"""The arithmetic of the decoder. `Kernels` chooses who does it; the answers agree.

`xla/` is the reference and runs anywhere; `cpu/` are compiled kernels for the CPU.
"""

from .dispatch import attention, embed, matmul, products
from .elementwise import activate, rms_norm, rotary_tables, rotate
from .layout import Layout

__all__ = [
    "Layout",
    "activate",
    "attention",
    "embed",
    "matmul",
    "products",
    "rms_norm",
    "rotary_tables",
    "rotate",
]
