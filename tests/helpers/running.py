"""Cases of every family, and one sequence of theirs run through the pure steps."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
from driving import chunk, decoding, new_state, page_table
from hf_models import Case

from stoker.engine import steps
from stoker.engine.cache import new_cache
from stoker.engine.pages import pages_for
from stoker.engine.sampling_params import SamplingParams
from stoker.models.loading import Model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.5],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "partial_rotary_factor": 0.5,
}
GEMMA = {"head_dim": 16, "tie_word_embeddings": True}
GEMMA2 = {**GEMMA, "sliding_window": 16, "query_pre_attn_scalar": 24}
GEMMA3 = {**GEMMA2, "num_hidden_layers": 6}
PHI3 = {"head_dim": 16, "hidden_size": 128}
LONG_PHI3 = {**PHI3, "rope_parameters": LONGROPE}
GRANITE = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 4.0,
}
QWEN3_MOE = {
    "head_dim": 16,
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
#: Latent attention with unequal widths everywhere, and experts in three groups.
DEEPSEEK = {
    "num_key_value_heads": 8,
    "q_lora_rank": None,
    "kv_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "moe_intermediate_size": 32,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
GROUPS = {"n_group": 3, "topk_group": 2, "num_experts_per_tok": 3}
DEEPSEEK_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
DEEPSEEK3 = {**DEEPSEEK, **GROUPS, "q_lora_rank": 32, "rope_parameters": DEEPSEEK_YARN}
GPT_OSS = {
    "head_dim": 16,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "sliding_window": 16,
    "rope_parameters": {**YARN, "rope_theta": 150000.0, "truncate": False},
}
CASES = {
    "llama": Case("Llama"),
    "llama-tied": Case("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama-heads": Case("Llama", {"hidden_size": 96, "head_dim": 16, "num_key_value_heads": 8}),
    "llama-biases": Case("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": Case(
        "Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}
    ),
    "llama-llama3": Case("Llama", {"rope_parameters": LLAMA3, "head_dim": 16}),
    "mistral": Case("Mistral", {"sliding_window": 16}),
    "mistral-whole": Case("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": Case("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": Case(
        "Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    ),
    "qwen2-yarn": Case("Qwen2", {"rope_parameters": YARN, "head_dim": 16}),
    "qwen3": Case("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "mixtral": Case("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": Case("Qwen3Moe", QWEN3_MOE),
    "qwen3-moe-shares": Case("Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": False}),
    "smollm3": Case("SmolLM3", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "smollm3-window": Case(
        "SmolLM3",
        {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 16},
    ),
    "gemma": Case("Gemma", {**GEMMA, "num_key_value_heads": 1}),
    "gemma2": Case("Gemma2", GEMMA2),
    "gemma2-uncapped": Case(
        "Gemma2",
        {**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": Case("Gemma3", GEMMA3, config_kind="Gemma3Text"),
    "gemma3-linear": Case(
        "Gemma3",
        {
            **GEMMA3,
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            },
        },
        config_kind="Gemma3Text",
    ),
    "phi3": Case("Phi3", {**PHI3, "sliding_window": 16}),
    "phi3-short": Case("Phi3", {**LONG_PHI3, "original_max_position_embeddings": 128}),
    "phi3-long": Case("Phi3", {**LONG_PHI3, "original_max_position_embeddings": 32}),
    "olmo2": Case("Olmo2"),
    "olmo3": Case(
        "Olmo3",
        {
            "num_hidden_layers": 5,
            "sliding_window": 16,
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
    "granite": Case("Granite", {**GRANITE, "tie_word_embeddings": True}),
    "deepseek-v2-lite": Case("DeepseekV2", DEEPSEEK),
    "deepseek-v2": Case(
        "DeepseekV2",
        {
            **DEEPSEEK,
            **GROUPS,
            "q_lora_rank": 32,
            "topk_method": "group_limited_greedy",
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek-v3": Case("DeepseekV3", DEEPSEEK3),
    "deepseek-v3-mscale": Case(
        "DeepseekV3", {**DEEPSEEK3, "rope_parameters": {**DEEPSEEK_YARN, "mscale": 0.707}}
    ),
    "deepseek-v3-plain": Case(
        "DeepseekV3",
        {
            **DEEPSEEK,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "q_lora_rank": None,
        },
    ),
    "gpt-oss": Case("GptOss", GPT_OSS),
    "gpt-oss-layers": Case(
        "GptOss",
        {
            **GPT_OSS,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "num_key_value_heads": 8,
            "attention_bias": False,
        },
    ),
}
#: Tokens of a prompt and of a forced reply to it, and rows of a chunk.
LENGTH, REPLY, CHUNK = 75, 5, 32


def token_ids() -> list[int]:
    """Prompt and reply."""
    return np.random.default_rng(3).integers(0, 320, LENGTH + REPLY).tolist()


@functools.lru_cache(maxsize=4)
def compiled(step, config):
    """Compiled without the optimisations that cost more than they save here."""
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(functools.partial(step, config=config), compiler_options=options)


def logits_of(model: Model, size: int) -> np.ndarray:
    """Logits after the prompt run `size` rows at a time, then after each forced token of a reply.

    Args:
      model: runs `token_ids()`.
      size: rows of a prefill chunk, padded to the length of the prompt.

    Returns:
      `[REPLY + 1, V]`.
    """
    ids = token_ids()
    pages = pages_for(len(ids))
    config = model.config.for_context(len(ids))
    prefill, decode = (
        compiled(step, config) for step in (steps.prefill_logits, steps.decode_logits)
    )
    cache, table = new_cache(config, pages), page_table(1, pages)
    for start in range(0, LENGTH, size):
        batch = chunk([ids[start : min(start + size, LENGTH)]], [start], table, LENGTH)
        cache, last = prefill(model.params, cache, batch)
    logits = [last[0]]
    state, active = new_state([SamplingParams()]), decoding([True], table)
    for length, token in enumerate(ids[LENGTH:], LENGTH):
        newest = {"tokens": np.array([token], np.int32), "lengths": np.array([length], np.int32)}
        cache, last = decode(model.params, cache, dataclasses.replace(state, **newest), active)
        logits.append(last[0])
    return np.stack(jax.device_get(logits))
