"""The reference implementations: plain XLA, for every platform."""

from .attention import attention
from .matmul import grouped_matmul, matmul

__all__ = ["attention", "grouped_matmul", "matmul"]
