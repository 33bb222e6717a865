"""Tiny seeded models, and the same weights in Hugging Face's implementation."""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import numpy as np

from stoker.models.config import Kernels, ModelConfig, Rope
from stoker.models.loading import Model
from stoker.models.parameters import Params, init_params, named_parameters
from stoker.models.parts import Latent, Router
from stoker.models.tokenizers import Tokenizer

#: "T-LLAMA": two layers, eight query heads on two KV heads.
TINY = ModelConfig(
    family="llama",
    vocab_size=512,
    d_model=64,
    n_layers=2,
    n_heads=8,
    n_kv_heads=2,
    head_dim=8,
    d_ff=160,
    max_positions=512,
    norm_eps=1e-5,
    rope=Rope(theta=10000.0, dims=8),
)

#: Who does the arithmetic, each to the accuracy of float32.
KERNELS = {"xla": Kernels("xla"), "cpu": Kernels("cpu", "float32")}

#: Variations that change what is computed, each on top of `TINY`.
VARIANTS = {
    "plain": {},
    "tied": {"tied_head": True},
    "bias": {"attention_bias": True},
    "wide_heads": {"head_dim": 16, "rope": Rope(theta=500.0, dims=16)},
    "one_kv_head": {"n_kv_heads": 1},
    "no_sharing": {"n_kv_heads": 8},
    "linear_rope": {"rope": Rope(theta=10000.0, dims=8, scale=2.0)},
    "odd_sizes": {"d_model": 72, "head_dim": 16, "rope": Rope(1e4, 16), "vocab_size": 509},
}


#: Latent attention in every layer, and after one dense layer experts in groups beside a shared MLP.
DEEPSEEK = dataclasses.replace(
    TINY,
    family="deepseek_v3",
    n_kv_heads=1,
    head_dim=24,
    rope=Rope(theta=10000.0, dims=8),
    latent=Latent(kv_rank=32, rope_dim=8, nope_dim=16, v_dim=20, q_rank=24),
    d_ff=32,
    n_experts=6,
    experts_per_token=2,
    router=Router("sigmoid", True, groups=3, used_groups=2, group_top=2, scale=1.5),
    dense_layers=1,
    dense_d_ff=96,
    shared_d_ff=64,
)


def variant(name: str, kernels: str = "xla") -> ModelConfig:
    return dataclasses.replace(TINY, kernels=KERNELS[kernels], **VARIANTS[name])


def random_params(config: ModelConfig, seed: int = 0) -> Params:
    """Random weights with random norms and biases, so that leaving one out changes the logits."""
    params = init_params(config, jax.random.key(seed), scale=2.0)
    rng = np.random.default_rng(seed)

    def shake(leaf: jax.Array) -> jax.Array:
        if leaf.ndim > 1:
            return leaf
        return leaf + rng.normal(0, 0.5, leaf.shape).astype(np.float32)

    return jax.tree.map(shake, params)


def tiny_model(config: ModelConfig, params: Params, tokenizer: Tokenizer | None = None) -> Model:
    """A model that no file holds."""
    return Model("tiny", pathlib.Path(), config, params, tokenizer, 0, 0.0)


HF_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    **{name: f"self_attn.{name}_proj.weight" for name in "qkvo"},
    **{f"{name}_bias": f"self_attn.{name}_proj.bias" for name in "qkv"},
    **{name: f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}


def hugging_face(config: ModelConfig, params: Params):
    """The same model as a float32 `LlamaForCausalLM`."""
    import torch
    import transformers

    rope = {"rope_type": "default", "rope_theta": config.rope.theta}
    if config.rope.scale != 1:
        rope |= {"rope_type": "linear", "factor": config.rope.scale}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=config.d_ff,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_positions,
            rms_norm_eps=config.norm_eps,
            rope_parameters=rope,
            tie_word_embeddings=config.tied_head,
            attention_bias=config.attention_bias,
            attn_implementation="eager",
        )
    ).eval()
    state = model.state_dict()
    filled = set()
    for (name, _), value in zip(named_parameters(params), jax.tree.leaves(params), strict=True):
        *layer, leaf = name.split(".")
        key = f"model.layers.{layer[1]}.{HF_NAMES[leaf]}" if layer else HF_NAMES[leaf]
        state[key].copy_(torch.from_numpy(np.array(value, np.float32)))
        filled.add(key)
    if config.tied_head:
        filled.add("lm_head.weight")
    # LlamaForCausalLM with attention_bias has an output bias too; Qwen2-like models do not.
    for key in state.keys() - filled:
        assert key.endswith("o_proj.bias"), key
        state[key].zero_()
    return model


def hf_logits(model, ids: list[int]) -> np.ndarray:
    """Logits float32 `[len(ids), V]`."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().numpy()
