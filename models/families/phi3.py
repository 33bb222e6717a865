"""Phi-3 and Phi-4: Llama with Q, K and V in one tensor, gate and up in another, and LongRoPE."""

from __future__ import annotations

from .family import Family, Fields
from .hf_config import ConfigJson
from .mistral import window
from .naming import gguf_naming, hf_naming


def _fused(qkv: str, gate_up: str) -> dict[str, str]:
    """Q, K and V are the rows of one tensor in this order, and gate and up of another."""
    return dict.fromkeys("qkv", qkv) | dict.fromkeys(("gate", "up"), gate_up)


def more(json: ConfigJson, fields: Fields) -> Fields:
    """A window on every layer, where there is one; and keys that must not mean anything."""
    for key in ("full_attn_mod", "interpolate_factor"):
        if json.integer(key, 1) != 1:
            json.unsupported(key)
    return window(json, fields)


PHI3 = Family(
    name="phi3",
    model_types=("phi3",),
    architecture="phi3",
    hf=hf_naming(
        _fused(
            "model.layers.{layer}.self_attn.qkv_proj.weight",
            "model.layers.{layer}.mlp.gate_up_proj.weight",
        )
    ),
    gguf=gguf_naming(_fused("blk.{layer}.attn_qkv.weight", "blk.{layer}.ffn_up.weight")),
    from_json=more,
)
