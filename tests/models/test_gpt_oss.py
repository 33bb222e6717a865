"""GPT-OSS as its makers publish it: experts in MXFP4, and the older spelling of its config."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hf_models import edit_json, make, reference_logits, write
from running import CASES, CHUNK, LENGTH, logits_of, token_ids
from safetensors.numpy import load_file, save_file

from stoker.models.checkpoints.prequantised import open_prequantised
from stoker.models.errors import StokerError
from stoker.models.families import family_of_type
from stoker.models.families.hf_config import ConfigJson, model_config
from stoker.models.loading import load_model
from stoker.models.ops import cpu
from stoker.models.quantized import QuantArray, dequantize

#: Four-bit floats by their code, from the Microscaling Formats 1.0.
LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def mxfp4(rng: np.random.Generator, shape: tuple[int, int, int]) -> tuple[np.ndarray, ...]:
    """Blocks, scales and values of random matrices `[E, R, C]`."""
    *rows, C = shape
    codes = rng.integers(0, 16, shape, np.uint8)
    scales = rng.integers(121, 125, (*rows, C // 32), np.uint8)
    pairs = codes.reshape(*rows, C // 32, 16, 2)
    values = LEVELS[codes] * np.repeat(np.exp2(scales - np.float32(127)), 32, axis=-1)
    return pairs[..., 0] | pairs[..., 1] << 4, scales, values


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder with experts in MXFP4, their values `[E, R, C]`, and transformers' logits."""
    import torch

    model, rng = make(CASES["gpt-oss"]), np.random.default_rng(0)
    stored, values = {}, {}
    for name, weight in model.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        E, inputs, outputs = weight.shape
        blocks, scales, values[name] = mxfp4(rng, (E, outputs, inputs))
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        with torch.no_grad():
            weight.copy_(torch.from_numpy(values[name].swapaxes(1, 2)))
    folder = write(model, tmp_path_factory.mktemp("published"))
    plain = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in plain.items() if name not in values}
    save_file(kept | stored, folder / "model.safetensors", metadata={"format": "pt"})
    spared = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    edit_json(
        folder / "config.json",
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": spared},
    )
    return folder, values, reference_logits(model, token_ids())


@pytest.mark.reference
@pytest.mark.parametrize("kernels", ["xla", "cpu"])
def test_a_published_model_has_its_values_and_logits(kernels: str, published) -> None:
    folder, values, expected = published
    model = load_model(folder, kernels=kernels, activations="float32", kv_dtype="float32")
    for number, layer in enumerate(model.params["layers"]):
        stem = f"model.layers.{number}.mlp.experts"
        both = values[f"{stem}.gate_up_proj"]
        parts = {"gate": both[:, ::2], "up": both[:, 1::2], "down": values[f"{stem}.down_proj"]}
        for name, part in parts.items():
            held = layer[f"expert_{name}"]
            assert isinstance(held, QuantArray if kernels == "xla" else cpu.PackedArray)
            assert held.bits == 4
            held = cpu.unpack(held) if isinstance(held, cpu.PackedArray) else held
            np.testing.assert_array_equal(dequantize(held), part)
    expected = expected[LENGTH - 1 :]
    np.testing.assert_allclose(logits_of(model, CHUNK), expected, atol=1e-4, rtol=0)


@pytest.mark.reference
def test_the_published_spelling_of_the_configuration_means_the_same(published) -> None:
    folder, *_ = published
    values = json.loads((folder / "config.json").read_text())
    rope = values.pop("rope_parameters")
    older = values | {
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope | {"beta_fast": 32.0, "beta_slow": 1.0},
        "initial_context_length": 32,
        "experts_per_token": 3,
        "swiglu_limit": 7.0,
    }
    older.pop("layer_types")
    older.pop("swiglu_alpha")
    family = family_of_type("gpt_oss")
    tensors = open_prequantised(folder, values["quantization_config"]).tensors
    today = json.loads((folder / "config.json").read_text())
    for config in (older, today):
        del config["quantization_config"]
    same = [model_config(family, ConfigJson(config), tensors) for config in (older, today)]
    assert same[0] == same[1]
    with pytest.raises(StokerError, match=r"'swiglu_limit' is 5\.0"):
        model_config(family, ConfigJson(older | {"swiglu_limit": 5.0}), tensors)
    with pytest.raises(StokerError, match="'hidden_act' is 'gelu'"):
        model_config(family, ConfigJson(older | {"hidden_act": "gelu"}), tensors)


@pytest.mark.reference
def test_integer_activations_stay_close_and_chunks_change_no_bit(published) -> None:
    folder, _, expected = published
    model = load_model(folder, kernels="cpu")
    whole = logits_of(model, LENGTH)
    np.testing.assert_array_equal(logits_of(model, CHUNK), whole)
    np.testing.assert_array_equal(logits_of(model, 1), whole)
    wanted = expected[LENGTH - 1 :]
    assert np.corrcoef(whole.ravel(), wanted.ravel())[0, 1] > 0.99
