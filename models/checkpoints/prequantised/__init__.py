"""Checkpoints of Hugging Face whose weights were quantised before, as `config.json` says how."""

from __future__ import annotations

from .checkpoint import QuantisedCheckpoint, QuantisedTensor
from .methods import METHODS, open_prequantised

__all__ = ["METHODS", "QuantisedCheckpoint", "QuantisedTensor", "open_prequantised"]
