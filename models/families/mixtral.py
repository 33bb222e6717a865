"""Mixtral: Mistral with eight experts. Its GGUF files say Llama."""

from __future__ import annotations

from ..errors import StokerError
from .family import Family, Fields
from .gguf_config import Keys
from .hf_config import ConfigJson
from .mistral import window
from .naming import hf_naming

_EXPERT = "model.layers.{layer}.block_sparse_moe.experts.{expert}."


def experts(json: ConfigJson, fields: Fields) -> Fields:
    """Experts, whose number has two spellings, beside Mistral's window."""
    key = "num_local_experts" if json.has("num_local_experts") else "num_experts"
    json.value("router_jitter_noise", 0.0)  # of training
    return {
        **window(json, fields),
        "n_experts": json.integer(key),
        "experts_per_token": json.integer("num_experts_per_tok"),
    }


def experts_of_keys(keys: Keys, fields: Fields) -> Fields:
    """The same from GGUF, where any model may have experts: one without has none or zero."""
    number = keys.integer("expert_count", 0)
    if not number:
        return {}
    if keys.number("expert_weights_scale", 1.0) not in (0.0, 1.0):
        raise StokerError(
            f"'{keys.name('expert_weights_scale')}' is not supported; give a model without it"
        )
    if keys.integer("expert_shared_count", 0):
        raise StokerError(
            f"'{keys.name('expert_shared_count')}' is not supported; give a model whose experts "
            "are all routed"
        )
    width = keys.integer("expert_feed_forward_length", fields["d_ff"])
    return {
        "n_experts": number,
        "experts_per_token": keys.integer("expert_used_count"),
        "d_ff": width,
    }


MIXTRAL = Family(
    name="mixtral",
    model_types=("mixtral",),
    hf=hf_naming(
        {
            "router": "model.layers.{layer}.block_sparse_moe.gate.weight",
            "expert_gate": _EXPERT + "w1.weight",
            "expert_up": _EXPERT + "w3.weight",
            "expert_down": _EXPERT + "w2.weight",
        }
    ),
    from_json=experts,
)
