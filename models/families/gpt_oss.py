"""GPT-OSS: experts with biases and a clamped SwiGLU, attention sinks, windows on every other layer.

Hugging Face's files hold gate and up of all experts in one tensor, output by output in turn: as
MXFP4 with outputs first, or as floats with inputs first.
"""

from __future__ import annotations

import dataclasses

from ..ops.elementwise import SWIGLU_ALPHA, SWIGLU_LIMIT
from . import gguf_config
from .family import Family, Fields
from .gguf_config import Keys
from .hf_config import ConfigJson, sliding_layers, windowed
from .mixtral import experts_of_keys
from .naming import Naming, gguf_naming, hf_naming

_WINDOW = 128
_MLP = "model.layers.{layer}.mlp."
_HF = {
    "sinks": "model.layers.{layer}.self_attn.sinks",
    "router": f"{_MLP}router.weight",
    "router_bias": f"{_MLP}router.bias",
    "expert_gate": f"{_MLP}experts.gate_up_proj",
    "expert_up": f"{_MLP}experts.gate_up_proj",
    "expert_down": f"{_MLP}experts.down_proj",
    "expert_gate_bias": f"{_MLP}experts.gate_up_proj_bias",
    "expert_up_bias": f"{_MLP}experts.gate_up_proj_bias",
    "expert_down_bias": f"{_MLP}experts.down_proj_bias",
}
_GGUF = {
    "sinks": "blk.{layer}.attn_sinks.weight",
    # What the converter calls the norm before the MLP.
    "mlp_norm": "blk.{layer}.post_attention_norm.weight",
    "router_bias": "blk.{layer}.ffn_gate_inp.bias",
    **{
        f"expert_{name}_bias": f"blk.{{layer}}.ffn_{name}_exps.bias"
        for name in ("gate", "up", "down")
    },
}


def more(json: ConfigJson, fields: Fields) -> Fields:
    """Windows and experts; what the arithmetic takes as given must be so."""
    for key, fixed in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
        if json.number(key, fixed) != fixed:
            json.unsupported(key)
    if json.value("hidden_act", "silu") != "silu":
        json.unsupported("hidden_act")
    # Told otherwise in the rotary settings, which count; and the number of experts, again.
    json.value("initial_context_length", 0)
    used = json.integer("num_experts_per_tok", json.integer("experts_per_token", 4))
    even = [layer % 2 == 0 for layer in range(fields["n_layers"])]
    return {
        "kinds": windowed(
            fields, json.integer("sliding_window", _WINDOW), sliding_layers(json, even)
        ),
        "n_experts": json.integer("num_local_experts"),
        "experts_per_token": used,
    }


def more_keys(keys: Keys, fields: Fields) -> Fields:
    """The same from GGUF, which does not say that the ends of YaRN's ramp are not rounded."""
    found = {**experts_of_keys(keys, fields)}
    if keys.value("rope.scaling.type", "none") == "yarn":
        rope = fields["rope"]
        found["rope"] = gguf_config.yarn(
            keys, rope.theta, rope.dims, fields["max_positions"], truncate=False
        )
    sliding = gguf_config.sliding_layers(keys, fields, period=2)
    return {**found, "kinds": gguf_config.windowed(keys, fields, sliding)}


def _hf() -> Naming:
    transposed = ("expert_gate", "expert_up", "expert_down")
    return dataclasses.replace(hf_naming(_HF), transposed=transposed, interleaved=True)


GPT_OSS = Family(
    name="gpt_oss",
    model_types=("gpt_oss",),
    architecture="gpt-oss",
    traits={"activation": "clamped_swiglu", "attention_sinks": True, "router_bias": True},
    hf=_hf(),
    gguf=gguf_naming(_GGUF),
    from_json=more,
    from_keys=more_keys,
)
