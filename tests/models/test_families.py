"""Every family from Hugging Face's files: logits equal transformers' in float32."""

from __future__ import annotations

import functools
import json

import jax
import numpy as np
import pytest
from hf_models import make, reference_logits, write
from running import CASES, CHUNK, LENGTH, logits_of, token_ids

from stoker.engine.engine import Engine
from stoker.engine.sampling_params import SamplingParams
from stoker.models.checkpoints.safetensors import SafetensorsCheckpoint
from stoker.models.families import family_of_type
from stoker.models.families.hf_config import ConfigJson, model_config
from stoker.models.loading import load_model


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """A model's folder and transformers' logits, by the name of its case."""

    @functools.cache
    def made(name: str):
        model = make(CASES[name])
        folder = write(model, tmp_path_factory.mktemp(name))
        return folder, reference_logits(model, token_ids())

    return made


@pytest.mark.reference
@pytest.mark.parametrize("kernels", ["xla", "cpu"])
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, kernels: str, reference) -> None:
    folder, expected = reference(name)
    model = load_model(folder, kernels=kernels, activations="float32")
    expected = expected[LENGTH - 1 :]
    whole = logits_of(model, LENGTH)
    np.testing.assert_allclose(whole, expected, atol=1e-4, rtol=0)
    np.testing.assert_allclose(logits_of(model, CHUNK), expected, atol=1e-4, rtol=0)


@pytest.mark.reference
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_experts_in_one_tensor_are_those_of_many(name: str, reference, tmp_path) -> None:
    folder, _ = reference(name)
    write(make(CASES[name]), tmp_path, save_original_format=False)
    assert any(
        key.endswith("experts.gate_up_proj") for key in SafetensorsCheckpoint.open(tmp_path).tensors
    )
    many, one = (load_model(path, kernels="xla").params for path in (folder, tmp_path))
    assert jax.tree.all(jax.tree.map(np.array_equal, many, one))


OLDER = {
    "gemma2": {"layer_types": ..., "rope_parameters": ..., "rope_theta": 10000.0},
    "gemma3": {
        "layer_types": ...,
        "sliding_window_pattern": 6,
        "rope_parameters": ...,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": None,
    },
    "olmo3": {
        "layer_types": ...,
        "rope_parameters": ...,
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "smollm3": {"layer_types": ..., "no_rope_layers": ..., "no_rope_layer_interval": 4},
    "qwen2-window": {"layer_types": ...},
    "phi3-long": {
        "rope_parameters": ...,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {
            "type": "su",
            "short_factor": [1.0, 1.1, 1.2, 1.5],
            "long_factor": [1.0, 2.0, 4.0, 8.0],
        },
    },
    "qwen2-yarn": {
        "rope_parameters": ...,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
}


@pytest.mark.reference
@pytest.mark.parametrize("name", OLDER)
def test_older_spellings_of_a_configuration_mean_the_same(name: str, reference) -> None:
    """Transformers spells out what the files of the models' makers leave to defaults."""
    folder, _ = reference(name)
    values = json.loads((folder / "config.json").read_text())
    family = family_of_type(values["model_type"])
    tensors = SafetensorsCheckpoint.open(folder).tensors
    changed = {key: v for key, v in (values | OLDER[name]).items() if v is not ...}
    today, older = (model_config(family, ConfigJson(v), tensors) for v in (values, changed))
    assert older == today and changed != values


@pytest.mark.reference
def test_bfloat16_weights_give_what_they_stand_for(tmp_path) -> None:
    import torch
    import transformers

    write(make(CASES["llama"]).to(torch.bfloat16), tmp_path)
    model = load_model(tmp_path, kernels="cpu", kv_dtype="float32")
    # Not the model above: rounding it rounded its rotary frequencies too.
    rounded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = reference_logits(rounded, token_ids())[LENGTH - 1 :]
    np.testing.assert_allclose(logits_of(model, CHUNK), expected, atol=1e-4, rtol=0)


@pytest.mark.reference
def test_an_engine_takes_the_factors_of_its_context(reference) -> None:
    """LongRoPE: a prompt gets the short or the long factors by the longest sequence served."""
    folder, expected = reference("phi3-short")
    model = load_model(folder, kernels="cpu", activations="float32", kv_dtype="float32")
    ids = token_ids()
    wanted = jax.nn.log_softmax(expected, axis=-1)[np.arange(len(ids) - 1), ids[1:]]
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=0)
    short, long = (
        Engine(model, slots=1, context=context).generate([ids], scoring)[0].prompt_logprobs[1:]
        for context in (128, 129)
    )
    np.testing.assert_allclose(short, wanted, atol=2e-4)
    assert np.abs(np.array(long) - wanted).max() > 0.01
