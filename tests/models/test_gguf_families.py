"""Every family from GGUF: logits equal transformers' on the weights that the file holds."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from gguf_models import write_gguf_model
from hf_models import make, reference_logits
from running import CASES, CHUNK, LENGTH, logits_of, token_ids

from stoker.models.loading import load_model
from stoker.models.quantized import LogicalArray, QuantArray

#: What a converter cannot say: no soft-caps, another NoPE interval, windows of Qwen2 and SmolLM3,
#: a choice of layers or a second rotary base of Gemma 3's other than its own, shares of experts
#: that do not sum to one, factors on DeepSeek's cosines, or rotated rows of its that are halves.
UNSAID = {
    "gemma2-uncapped",
    "smollm3-window",
    "qwen2-window",
    "gemma3-linear",
    "llama-biases",
    "qwen3-moe-shares",
    "gpt-oss-layers",
    "deepseek-v3-mscale",
    "deepseek-v3-plain",
}
NAMES = [name for name in CASES if name not in UNSAID]
#: With every way that tensors are moved: as they are, rows permuted, rows of a fused one.
QUANTISED = (
    "llama-heads",
    "qwen3",
    "smollm3",
    "gemma3",
    "phi3",
    "granite",
    "qwen3-moe",
    "deepseek-v3",
    "gpt-oss",
)


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """A GGUF file and transformers' logits, by the name of a case and a quantisation."""

    @functools.cache
    def made(name: str, quantisation: str, **options):
        case = CASES[name]
        if name.startswith(("gemma2", "gemma3")):
            case = case.replace(query_pre_attn_scalar=case.config["head_dim"])
        model = make(case)
        path = tmp_path_factory.mktemp(name) / "m.gguf"
        write_gguf_model(model, path, quantisation, **options)
        return path, reference_logits(model, token_ids())

    return made


@pytest.mark.reference
@pytest.mark.parametrize(
    ("name", "quantisation"),
    [
        *((name, "F32") for name in NAMES),
        *((name, "Q8_0") for name in QUANTISED),
        ("gpt-oss", "MXFP4"),
    ],
)
def test_logits_equal_transformers(name: str, quantisation: str, written) -> None:
    path, expected = written(name, quantisation)
    model = load_model(path, kernels="cpu", activations="float32", kv_dtype="float32")
    expected = expected[LENGTH - 1 :]
    np.testing.assert_allclose(logits_of(model, CHUNK), expected, atol=1e-4, rtol=0)


@pytest.mark.reference
@pytest.mark.parametrize("name", ["phi3", "olmo2"])
def test_the_reference_kernels_take_quantised_parts_of_a_tensor(name: str, written) -> None:
    path, expected = written(name, "Q8_0")
    model = load_model(path, kernels="xla")
    assert isinstance(model.params["layers"][0]["k"], QuantArray)
    np.testing.assert_allclose(logits_of(model, LENGTH), expected[LENGTH - 1 :], atol=1e-4, rtol=0)


@pytest.mark.reference
@pytest.mark.parametrize("quantisation", ["F32", "Q8_0"])
def test_older_files_of_deepseek_hold_keys_and_values_together(quantisation: str, written) -> None:
    path, expected = written("deepseek-v3", quantisation, fused_kv=True)
    model = load_model(path, kernels="cpu", activations="float32", kv_dtype="float32")
    expected = expected[LENGTH - 1 :]
    np.testing.assert_allclose(logits_of(model, CHUNK), expected, atol=1e-4, rtol=0)
    layer = model.params["layers"][0]
    assert isinstance(layer["v_b"], LogicalArray) == (quantisation == "Q8_0")
    assert layer["k_b"].shape == (8, 96, 32) and layer["k_b"].dtype == np.float32
