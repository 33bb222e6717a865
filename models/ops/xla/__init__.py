"""The reference implementations: plain XLA, for every platform."""

from .attention import attention
from .matmul import matmul
from .sample import largest, sample

__all__ = ["attention", "largest", "matmul", "sample"]
