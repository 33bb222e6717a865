"""Models of transformers as GGUF files, with the names and keys that llama.cpp's converter writes.

Tensor names come from the `gguf` package's own tables; keys are spelt by its writer.
"""

from __future__ import annotations

import pathlib
from typing import Any

import gguf
import numpy as np
from gguf_deepseek import is_deepseek, join_kv, split_kv, write_keys
from gguf_files import byte_vocabulary

#: `model_type` to architecture, and whether rows of Q and K are permuted.
ARCHITECTURES = {
    "llama": ("llama", True),
    "mistral": ("llama", True),
    "mixtral": ("llama", True),
    "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
    "qwen3_moe": ("qwen3moe", False),
    "smollm3": ("smollm3", True),
    "gemma": ("gemma", False),
    "gemma2": ("gemma2", False),
    "gemma3_text": ("gemma3", False),
    "phi3": ("phi3", False),
    "olmo2": ("olmo2", False),
    "olmo3": ("olmo2", False),
    "granite": ("granite", True),
    "gpt_oss": ("gpt-oss", False),
    "deepseek_v2": ("deepseek2", False),
    "deepseek_v3": ("deepseek2", False),
}


def write_gguf_model(
    model: Any, path: pathlib.Path, quantisation: str = "F32", *, fused_kv: bool = False
) -> pathlib.Path:
    """Writes `model`; matrices get `quantisation`, and its weights become what that stands for.

    `fused_kv` leaves DeepSeek's `kv_b_proj` whole, as older files do.
    """
    import torch

    config = model.config
    architecture, permuted = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    _write_keys(writer, config, fused_kv)
    for key, value in byte_vocabulary(config.vocab_size).items():
        kind = _KINDS.get(type(value)) or gguf.GGUFValueType.get_type(value)
        element = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
        writer.add_key_value(key, value, kind, element)
    number = {name: value for value, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    kind = gguf.GGMLQuantizationType[quantisation]
    biases = [pair for pair in model.named_buffers() if pair[0].endswith("correction_bias")]
    for name, weight in [*model.named_parameters(), *biases]:
        stem, _, ending = name.rpartition(".")
        values = weight.detach().numpy()
        turned = config.model_type == "gpt_oss" and ending.endswith("_proj") and values.ndim == 3
        bias = ending.endswith("_bias")
        if turned:  # its experts have inputs first
            values = values.swapaxes(1, 2)
        if stem.endswith("kv_b_proj") and not fused_kv:
            parts = split_kv(values, config)
            if quantisation != "F32":
                for part, matrix in parts.items():
                    quantised = gguf.quants.quantize(np.ascontiguousarray(matrix), kind)
                    parts[part] = gguf.quants.dequantize(quantised, kind)
                with torch.no_grad():
                    weight.copy_(torch.from_numpy(join_kv(parts)))
        # The scale of a group must not depend on rows that are permuted later.
        elif values.ndim > 1 and quantisation != "F32" and not bias:
            values = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
            with torch.no_grad():
                weight.copy_(torch.from_numpy(values.swapaxes(1, 2) if turned else values))
        if config.model_type.startswith("gemma") and stem.endswith("norm"):
            values = values + 1
        for part, heads in (
            ("q_proj", config.num_attention_heads),
            ("k_proj", config.num_key_value_heads),
        ):
            if permuted and stem.endswith(part):
                values = _permute(values, heads)
        if ending.startswith("gate_up_proj"):  # of all experts
            gate, up = np.split(values, 2, axis=1)
            if config.model_type == "gpt_oss":
                gate, up = values[:, ::2], values[:, 1::2]
            tensors = {f"{_experts(stem)}_gate_exps": gate, f"{_experts(stem)}_up_exps": up}
        elif stem.endswith("kv_b_proj") and not fused_kv:
            block = f"blk.{stem.split('.')[2]}."
            tensors = {block + part: matrix for part, matrix in parts.items()}
            ending = ".weight"
        elif ending == "e_score_correction_bias":
            tensors = {names.get_name(f"{stem}.e_score_correction"): values}
            ending = ".bias"
        elif ending.startswith("down_proj"):
            tensors = {f"{_experts(stem)}_down_exps": values}
        elif ending == "sinks":
            tensors = {names.get_name(name): values}
        else:
            tensors = {names.get_name(stem): values}
            ending = f".{ending}"
        ending = ending if ending.startswith(".") else ".bias" if bias else ".weight"
        for new, values in tensors.items():
            tensor = np.ascontiguousarray(values, np.float32)
            if values.ndim > 1 and quantisation != "F32" and not bias:
                tensor = gguf.quants.quantize(tensor, kind)
                writer.add_tensor(new + ending, tensor, raw_dtype=kind)
            else:
                writer.add_tensor(new + ending, tensor)
    _write_factors(writer, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_KINDS = {
    bool: gguf.GGUFValueType.BOOL,
    int: gguf.GGUFValueType.UINT32,
    float: gguf.GGUFValueType.FLOAT32,
}


def _experts(stem: str) -> str:
    """How the tensors of a layer's experts begin."""
    return f"blk.{stem.split('.')[2]}.ffn"


def _permute(values: np.ndarray, heads: int) -> np.ndarray:
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _rope(config: Any) -> dict[str, Any]:
    return config.rope_parameters.get("full_attention", config.rope_parameters)


def _write_keys(writer: Any, config: Any, fused_kv: bool) -> None:
    kind, rope = config.model_type, _rope(config)
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if is_deepseek(config):
        write_keys(writer, config, fused_kv)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if kind not in ("gemma", "gemma2"):
        writer.add_rope_freq_base(rope["rope_theta"])
    if kind != "phi3" and not is_deepseek(config):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if kind == "phi3":
        writer.add_key_length(head_dim)
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
        writer.add_sliding_window(config.sliding_window or 0)
    if kind in ("gemma2", "gemma3_text", "mistral", "gpt_oss", "olmo3") and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if kind == "olmo3":
        sliding = [layer == "sliding_attention" for layer in config.layer_types]
        writer.add_sliding_window_pattern(sliding)
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if kind == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if getattr(config, "num_local_experts", 0) and not is_deepseek(config):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if kind == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if kind == "gpt_oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if "original_max_position_embeddings" in rope:
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _write_factors(writer: Any, config: Any) -> None:
    """The tensors of context extension, as the converter makes them."""
    rope = _rope(config)
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        scale = config.max_position_embeddings / original
        factor = float(np.sqrt(1 + np.log(scale) / np.log(original))) if scale > 1 else 1.0
        writer.add_rope_scaling_attn_factors(factor)
        for length in ("long", "short"):
            factors = np.array(rope[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
    if rope["rope_type"] == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        dims = 2 * len(scaled)
        plain = rope["rope_theta"] ** (-np.arange(0, dims, 2) / dims)
        writer.add_tensor("rope_freqs.weight", (plain / scaled.numpy()).astype(np.float32))
