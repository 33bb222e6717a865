"""SmolLM3: Llama with no rotary embedding on every fourth layer (NoPE, Yang et al. 2025)."""

from __future__ import annotations

import dataclasses

from ..errors import StokerError
from .family import Family, Fields
from .gguf_config import Keys
from .gguf_config import windowed as windowed_keys
from .hf_config import ConfigJson, rope, rope_settings, sliding_layers, windowed
from .naming import gguf_naming

_INTERVAL = 4
_THETA = 2_000_000.0


def no_rope(json: ConfigJson, fields: Fields) -> Fields:
    """`no_rope_layers`, where 1 stands for a layer with rotary embedding, or else the interval."""
    layers = fields["n_layers"]
    interval = json.integer("no_rope_layer_interval", _INTERVAL)
    if interval < 1:
        raise StokerError(f"{json.where}: 'no_rope_layer_interval' must be at least 1")
    turned = [(layer + 1) % interval != 0 for layer in range(layers)]
    if json.has("no_rope_layers"):
        turned = [bool(value) for value in json.items("no_rope_layers", layers)]
    json.value("max_window_layers", 0)  # of Qwen2, which it copies: without a meaning here
    window = json.integer("sliding_window", 0)
    if not json.flag("use_sliding_window", False):
        window = 0
    # Without layer types, a window is for the layers that have no rotary embedding.
    sliding = sliding_layers(json, [not turn for turn in turned])
    return {
        "kinds": tuple(
            kind if turn else dataclasses.replace(kind, rope="none")
            for kind, turn in zip(windowed(fields, window, sliding), turned, strict=True)
        ),
        "rope": rope(json, rope_settings(json), fields, _THETA),
    }


def every_fourth(keys: Keys, fields: Fields) -> Fields:
    """GGUF files do not say which layers: it is every fourth."""
    plain = windowed_keys(keys, fields, [True] * fields["n_layers"])
    return {
        "kinds": tuple(
            dataclasses.replace(kind, rope="none") if (layer + 1) % _INTERVAL == 0 else kind
            for layer, kind in enumerate(plain)
        )
    }


SMOLLM3 = Family(
    name="smollm3",
    model_types=("smollm3",),
    architecture="smollm3",
    gguf=gguf_naming(paired=True),
    from_json=no_rope,
    from_keys=every_fourth,
)
