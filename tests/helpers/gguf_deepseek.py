"""What llama.cpp's converter does for DeepSeek-V2 and V3 alone."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np


def is_deepseek(config: Any) -> bool:
    return config.model_type in ("deepseek_v2", "deepseek_v3")


def write_keys(writer: Any, config: Any, fused: bool) -> None:
    """Keys beside the common ones; `fused` as files were before April 2025."""
    query = config.qk_nope_head_dim + config.qk_rope_head_dim
    if fused:
        writer.add_head_count_kv(config.num_attention_heads)
        writer.add_key_length(query)
        writer.add_value_length(config.v_head_dim)
    else:
        writer.add_head_count_kv(1)
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(query)
        writer.add_value_length_mla(config.v_head_dim)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.model_type == "deepseek_v3":
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.n_group:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if "mscale_all_dim" in config.rope_parameters:
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])


def split_kv(values: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    """The key part of `kv_b_proj`, transposed, and its value part, a matrix for each head."""
    heads = values.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
    keys, parts = heads[:, : config.qk_nope_head_dim], heads[:, config.qk_nope_head_dim :]
    return {"attn_k_b": keys.swapaxes(1, 2), "attn_v_b": parts}


def join_kv(parts: dict[str, np.ndarray]) -> np.ndarray:
    """The reverse."""
    keys, values = parts["attn_k_b"].swapaxes(1, 2), parts["attn_v_b"]
    joined = np.concatenate([keys, values], axis=1)
    return joined.reshape(-1, joined.shape[-1])
