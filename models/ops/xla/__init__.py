"""The reference implementations: plain XLA, for every platform."""

from .attention import attention
from .matmul import matmul

__all__ = ["attention", "matmul"]
