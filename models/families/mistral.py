"""Mistral: Llama with a window on every layer, where there is one. Its GGUF files say Llama."""

from __future__ import annotations

from .family import Family, Fields
from .hf_config import ConfigJson, windowed


def window(json: ConfigJson, fields: Fields) -> Fields:
    """`sliding_window`, null or absent for none."""
    everywhere = [True] * fields["n_layers"]
    return {"kinds": windowed(fields, json.integer("sliding_window", 0), everywhere)}


MISTRAL = Family(name="mistral", model_types=("mistral",), from_json=window)
