"""Qwen2 and Qwen2.5: Llama with biases on Q, K and V, and windows in its last layers if at all."""

from __future__ import annotations

from .family import Family, Fields
from .hf_config import ConfigJson, sliding_layers, windowed


def windows(json: ConfigJson, fields: Fields) -> Fields:
    """The window counts only where `use_sliding_window` is set, from `max_window_layers` on."""
    first = json.integer("max_window_layers", 28)
    window = json.integer("sliding_window", 4096)
    if not json.flag("use_sliding_window", False):
        window = 0
    late = [layer >= first for layer in range(fields["n_layers"])]
    return {"kinds": windowed(fields, window, sliding_layers(json, late))}


QWEN2 = Family(name="qwen2", model_types=("qwen2",), architecture="qwen2", from_json=windows)
