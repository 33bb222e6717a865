"""Qwen3 with experts in every layer."""

from __future__ import annotations

from .family import Family, Fields
from .hf_config import ConfigJson
from .mixtral import experts_of_keys
from .qwen2 import windows


def experts(json: ConfigJson, fields: Fields) -> Fields:
    """Experts; layers with an MLP of the dense kind are not supported."""
    if json.integer("decoder_sparse_step", 1) != 1:
        json.unsupported("decoder_sparse_step")
    if json.has("mlp_only_layers") and json.value("mlp_only_layers"):
        json.unsupported("mlp_only_layers")
    key = "num_experts" if json.has("num_experts") else "num_local_experts"
    return {
        **windows(json, fields),
        "n_experts": json.integer(key),
        "experts_per_token": json.integer("num_experts_per_tok"),
        "expert_norm": json.flag("norm_topk_prob", False),
        "d_ff": json.integer("moe_intermediate_size"),
    }


QWEN3_MOE = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    architecture="qwen3moe",
    traits={"qk_norm": "head"},
    from_json=experts,
    from_keys=experts_of_keys,
)
