"""The arithmetic of the decoder, one implementation per platform."""

from .attention import Layout, attention
from .elementwise import activate, rms_norm, rotary_tables, rotate
from .matmul import embed, matmul

__all__ = [
    "Layout",
    "activate",
    "attention",
    "embed",
    "matmul",
    "rms_norm",
    "rotary_tables",
    "rotate",
]
