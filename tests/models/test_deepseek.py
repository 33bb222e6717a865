"""DeepSeek's configurations as published, what its files may hold besides, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import safetensors.numpy
from gguf_models import write_gguf_model
from hf_models import edit_json, make, write
from running import CASES

from stoker.models.config import ModelConfig
from stoker.models.errors import StokerError
from stoker.models.families import family_of_type
from stoker.models.families.hf_config import ConfigJson, model_config
from stoker.models.loading import load_model, open_checkpoint
from stoker.models.random_weights import architecture

COMMON = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekConfig"},
    "ep_size": 1,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "v_head_dim": 128,
}
YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
PUBLISHED = {
    "deepseek-v3": {
        **COMMON,
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "vocab_size": 129280,
    },
    "deepseek-v2-lite": {
        **COMMON,
        "model_type": "deepseek_v2",
        "aux_loss_alpha": 0.001,
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "seq_aux": True,
        "topk_group": 1,
        "topk_method": "greedy",
        "vocab_size": 102400,
    },
}


def config_of(values: dict) -> ModelConfig:
    tensors = [f"model.layers.{n}" for n in range(100)] + ["lm_head.weight"]
    return model_config(family_of_type(values["model_type"]), ConfigJson(values), tensors)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_the_architectures_of_their_names(name: str) -> None:
    read, known = config_of(PUBLISHED[name]), architecture(name)
    assert read.predict_layers == PUBLISHED[name].get("num_nextn_predict_layers", 0)
    scales = {"attention_scale": None, "predict_layers": 0}
    assert dataclasses.replace(read, **scales) == dataclasses.replace(known, **scales)
    assert read.score_scale == pytest.approx(known.score_scale, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("deepseek-v3", {"attention_bias": True}),
        ("deepseek-v3", {"moe_layer_freq": 2}),
        ("deepseek-v3", {"topk_method": "greedy"}),
        ("deepseek-v3", {"scoring_func": "softmax"}),
        ("deepseek-v3", {"qk_head_dim": 200}),
        ("deepseek-v2-lite", {"topk_method": "noaux_tc"}),
        ("deepseek-v2-lite", {"norm_topk_prob": True}),
    ],
)
def test_what_would_change_the_results_is_refused_by_name(name: str, changes: dict) -> None:
    (key,) = changes
    with pytest.raises(StokerError, match=f"'{key}' is .* not supported"):
        config_of({**PUBLISHED[name], **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n_group": 7}, "256 experts do not divide into 7 groups"),
        ({"topk_group": 9}, "9 of 8 groups"),
        ({"first_k_dense_replace": 62}, "62 dense layers of 61"),
        ({"kv_lora_rank": 0}, "kv_rank 0"),
        ({"rope_scaling": {**YARN, "type": "dynamic"}}, "rope_type is 'dynamic'"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict, said: str) -> None:
    with pytest.raises(StokerError, match=said):
        config_of({**PUBLISHED["deepseek-v3"], **changes})


@pytest.mark.reference
def test_layers_that_predict_further_tokens_are_left_in_the_file(tmp_path) -> None:
    """Those that the configuration announces, and no others."""
    write(make(CASES["deepseek-v3"]), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    further = {"model.layers.2.eh_proj.weight": np.ones((2, 2), np.float32)}
    safetensors.numpy.save_file(tensors | further, path, {"format": "pt"})
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    load_model(tmp_path)
    edit_json(tmp_path / "config.json", num_nextn_predict_layers=0)
    with pytest.raises(StokerError, match=r"model.layers.2.eh_proj.weight.*does not use"):
        load_model(tmp_path)


@pytest.mark.reference
def test_gguf_files_say_what_hugging_faces_say(tmp_path) -> None:
    """But for the factor on scores, which one keeps as a float32 logarithm."""
    model = make(CASES["deepseek-v3"])
    write(model, tmp_path)
    stated = open_checkpoint(tmp_path).config
    for fused in (False, True):
        path = write_gguf_model(model, tmp_path / f"{fused}.gguf", fused_kv=fused)
        read = open_checkpoint(path).config
        assert read.score_scale == pytest.approx(stated.score_scale, rel=1e-6)
        assert read.norm_eps == pytest.approx(stated.norm_eps, rel=1e-6)
        same = {
            "family": "",
            "attention_scale": None,
            "norm_eps": 1.0,
            "predict_layers": 0,
            "max_positions": 1,
        }
        assert dataclasses.replace(read, **same) == dataclasses.replace(stated, **same)
