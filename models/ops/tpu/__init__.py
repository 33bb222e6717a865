"""Pallas kernels for TPUs."""

from .append import append, value_shape
from .attention import attention

__all__ = ["append", "attention", "value_shape"]
