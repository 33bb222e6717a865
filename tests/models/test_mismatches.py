"""Files that are whole but are not a model that is supported: each is named before it is read."""

from __future__ import annotations

import numpy as np
import pytest
from gguf_files import Tiny, write_gguf

from stoker.models.checkpoints.gguf import GGUFCheckpoint
from stoker.models.errors import StokerError
from stoker.models.loading import load_model

MATRIX, VECTOR = np.ones((64, 64), np.float32), np.ones(64, np.float32)
BAD = {
    "no_block_count": ({"llama.block_count": None}, {}, "'llama.block_count' is missing"),
    "no_context": ({"llama.context_length": None}, {}, "'llama.context_length' is missing"),
    "no_width": ({"llama.embedding_length": None}, {}, "'llama.embedding_length' is missing"),
    "no_ff": ({"llama.feed_forward_length": None}, {}, "'llama.feed_forward_length' is missing"),
    "no_heads": ({"llama.attention.head_count": None}, {}, "head_count' is missing"),
    "no_eps": (
        {"llama.attention.layer_norm_rms_epsilon": None},
        {},
        "'llama.attention.layer_norm_rms_epsilon' is missing",
    ),
    "heads_0": ({"llama.attention.head_count": 0}, {}, "head_count must be at least 1"),
    "heads_text": ({"llama.attention.head_count": "8"}, {}, "not '8'"),
    "heads_by_layer": ({"llama.attention.head_count_kv": [2, 2]}, {}, "head_count_kv' must be one"),
    "uneven": ({"llama.attention.head_count_kv": 3}, {}, "8 query heads cannot share 3"),
    "layers_many": ({"llama.block_count": 4_000_000_000}, {}, "only 21 tensors"),
    "layers_more": ({"llama.block_count": 3}, {}, "lacks tensors 'blk.2."),
    "layers_fewer": ({"llama.block_count": 1}, {}, "'blk.1.attn_k.weight'"),
    "width": ({"llama.embedding_length": 128}, {}, "where the configuration needs [512, 128]"),
    "ff_huge": ({"llama.feed_forward_length": 1 << 31}, {}, "needs [64, 2147483648]"),
    "head_huge": (
        {"llama.attention.key_length": 1 << 31, "llama.attention.value_length": 1 << 31},
        {},
        "'blk.0.attn_q.weight' has shape [64, 64]|'blk.0.attn_k.weight' has shape",
    ),
    "value_width": ({"llama.attention.value_length": 16}, {}, "value_length differs"),
    "rope_width": ({"llama.rope.dimension_count": 10}, {}, "rotary width 10"),
    "rope_base": ({"llama.rope.freq_base": -1.0}, {}, "must be positive"),
    "eps_nan": ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, {}, "not nan"),
    "yarn_bare": ({"llama.rope.scaling.type": "yarn"}, {}, "scaling.factor' is missing"),
    "yarn_zero": (
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 0.0},
        {},
        "0.0 over 256 tokens is no YaRN scaling",
    ),
    "dynamic": ({"llama.rope.scaling.type": "dynamic"}, {}, "'dynamic'"),
    "linear_bare": (
        {"llama.rope.scaling.type": "linear"},
        {},
        "scale_linear' is missing|scaling.factor' is missing",
    ),
    "attn_factor": ({"llama.rope.scaling.attn_factor": 1.2}, {}, "rope.scaling.attn_factor"),
    "experts": (
        {"llama.expert_count": 8, "llama.expert_used_count": 2},
        {},
        "lacks tensors 'blk.0.ffn_down_exps.weight'",
    ),
    "experts_bare": ({"llama.expert_count": 8}, {}, "'llama.expert_used_count' is missing"),
    "experts_many": (
        {"llama.expert_count": 8, "llama.expert_used_count": 9},
        {},
        "9 experts for each token of 8",
    ),
    "window_text": ({"llama.attention.sliding_window": "32"}, {}, "sliding_window' must be one"),
    "encoder": ({"llama.attention.causal": False}, {}, "'llama.attention.causal' is False"),
    "logit_scale": ({"llama.logit_scale": 0.5}, {}, "'llama.logit_scale' is 0.5"),
    "architecture": ({}, {}, "general.architecture is 'zzz'"),
    "extra": ({}, {"blk.0.foo.weight": MATRIX}, "'blk.0.foo.weight', which family 'llama'"),
    "extras": (
        {},
        {f"x.{index}.weight": VECTOR for index in range(5)},
        "'x.0.weight', 'x.1.weight', 'x.2.weight' and 2 more",
    ),
    "output_bias": ({}, {"blk.1.attn_output.bias": VECTOR}, "lacks tensor 'blk.0.attn_output"),
    "one_bias": (
        {},
        {"blk.1.attn_k.bias": np.ones(16, np.float32)},
        "lacks tensors 'blk.0.attn_k.bias', 'blk.0.attn_q.bias'",
    ),
    "no_embedding": ({}, {"token_embd.weight": None}, "'token_embd.weight' is missing"),
    "no_norm": ({}, {"output_norm.weight": None}, "lacks tensor 'output_norm.weight'"),
    "no_down": ({}, {"blk.1.ffn_down.weight": None}, "lacks tensor 'blk.1.ffn_down.weight'"),
    "transposed": (
        {},
        {"blk.0.ffn_down.weight": np.ones((160, 64), np.float32)},
        "'blk.0.ffn_down.weight' has shape [160, 64] where the configuration needs [64, 160]",
    ),
    "factors": ({}, {"rope_freqs.weight": np.ones(3, np.float32)}, "3 rotary factors for 4"),
    "factors_shape": ({}, {"rope_freqs.weight": MATRIX}, "'rope_freqs.weight' is F32 of shape"),
    "vocabulary": ({}, {}, "has 512 tokens but its embedding only 500 rows"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_mismatch_is_named_before_any_tensor_is_read(case, tmp_path, monkeypatch):
    metadata, tensors, reason = BAD[case]
    tiny = Tiny()
    if case == "architecture":
        tiny = Tiny(architecture="zzz")
    if case == "vocabulary":
        cut = np.ones((500, 64), np.float32)
        tensors = {"token_embd.weight": cut, "output.weight": cut}
    path = write_gguf(tmp_path / "m.gguf", tiny, metadata=metadata, tensors=tensors)

    def untouched(self, name):
        assert name == "rope_freqs.weight", f"'{name}' was read before the file was checked"
        return read(self, name)

    read = GGUFCheckpoint.read  # `load` calls it too
    monkeypatch.setattr(GGUFCheckpoint, "read", untouched)
    with pytest.raises(StokerError) as caught:
        load_model(path)
    message = str(caught.value)
    assert any(part in message for part in reason.split("|")), message
    assert "\n" not in message and len(message) < 300
