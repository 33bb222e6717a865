"""Granite 3: Llama with four multipliers."""

from __future__ import annotations

from ..errors import StokerError
from .family import Family, Fields
from .gguf_config import Keys
from .hf_config import ConfigJson
from .naming import gguf_naming


def multipliers(json: ConfigJson, fields: Fields) -> Fields:
    """Logits are divided by `logits_scaling`; the others are factors."""
    return _scales(
        embedding=json.number("embedding_multiplier", 1.0),
        attention=json.number("attention_multiplier", 1.0),
        residual=json.number("residual_multiplier", 1.0),
        logits=json.number("logits_scaling", 1.0),
    )


def scales(keys: Keys, fields: Fields) -> Fields:
    """The same from GGUF."""
    return _scales(
        embedding=keys.number("embedding_scale", 1.0),
        attention=keys.number("attention.scale", 0.0) or fields["head_dim"] ** -0.5,
        residual=keys.number("residual_scale", 1.0),
        logits=keys.number("logit_scale", 1.0),
    )


def _scales(*, embedding: float, attention: float, residual: float, logits: float) -> Fields:
    if logits <= 0:
        raise StokerError(f"the divisor of logits is {logits}; it must be positive")
    return {
        "embedding_scale": embedding,
        "attention_scale": attention,
        "residual_scale": residual,
        "logit_scale": 1 / logits,
    }


GRANITE = Family(
    name="granite",
    model_types=("granite",),
    architecture="granite",
    gguf=gguf_naming(paired=True),
    from_json=multipliers,
    from_keys=scales,
)
