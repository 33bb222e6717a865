"""The reference implementations: plain XLA, for every platform."""

from .attention import attention
from .matmul import grouped_matmul, matmul
from .sample import largest, sample
from .shared_attention import shared_attention

__all__ = ["attention", "grouped_matmul", "largest", "matmul", "sample", "shared_attention"]
