"""Whole models from pre-quantised files: logits equal transformers' with the plain values."""

from __future__ import annotations

import functools
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from compressed import COMPRESSED
from hf_models import Case, reference_logits
from prequantised import FORMATS, quantised
from running import CASES, LENGTH, logits_of, token_ids
from safetensors.numpy import save_file

from stoker.models.checkpoints.converting import convert_model
from stoker.models.checkpoints.inspection import inspect_model
from stoker.models.checkpoints.safetensors import SafetensorsCheckpoint
from stoker.models.errors import StokerError
from stoker.models.loading import load_model
from stoker.models.ops import cpu
from stoker.models.parameters import count_bytes
from stoker.models.quantized import QuantArray

MODELS = {
    "awq": (FORMATS["awq"], Case("Llama")),
    "gptq": (FORMATS["gptq-8"], CASES["qwen2"]),
    "fp8": (FORMATS["fp8-blocks"], CASES["qwen3"]),
    "int8": (COMPRESSED["int8-rows"], Case("Llama")),
    "mxfp4": (COMPRESSED["mxfp4"], Case("Llama")),
    "nvfp4": (COMPRESSED["nvfp4"], Case("Llama")),
    # Several parameters are rows of one matrix.
    "awq-fused": (FORMATS["awq"], CASES["phi3"]),
    # Experts are stacked.
    "fp8-experts": (FORMATS["fp8-odd-blocks"], CASES["mixtral"]),
    "pack4-experts": (COMPRESSED["pack4-groups"], CASES["qwen3-moe"]),
    # A matrix becomes two, one of them transposed.
    "fp8-latent": (FORMATS["fp8-blocks"], CASES["deepseek-v3"]),
}


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """A model's quantised folder and transformers' logits, by its name in `MODELS`."""

    @functools.cache
    def made(name: str):
        import torch
        import transformers

        format, case = MODELS[name]
        one_layer = case.replace(num_hidden_layers=1, layer_types=None)
        folder, plain, _ = quantised(tmp_path_factory.mktemp(name), one_layer, format)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            plain, dtype=torch.float32, attn_implementation="eager"
        )
        return folder, reference_logits(model.eval(), token_ids())[LENGTH - 1 :]

    return made


@pytest.mark.reference
@pytest.mark.parametrize("kernels", ["xla", "cpu"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, kernels: str, written) -> None:
    folder, expected = written(name)
    model = load_model(folder, kernels=kernels, activations="float32")
    np.testing.assert_allclose(logits_of(model, LENGTH), expected, atol=1e-4, rtol=0)


@pytest.mark.reference
@pytest.mark.parametrize("name", MODELS)
def test_inspection_foresees_what_is_loaded(name: str, written) -> None:
    folder, _ = written(name)
    report = inspect_model(folder)
    assert report.format == f"safetensors, {MODELS[name][0].config['quant_method']}"
    loaded = count_bytes(load_model(folder, kernels="xla").params)
    # The zero points of this one differ, though it does not say so.
    assert report.total.loaded_bytes == pytest.approx(loaded, rel=0.02 if name == "gptq" else 0)


@pytest.mark.reference
def test_weights_stay_small(written) -> None:
    folder, _ = written("awq")
    kinds = {"xla": QuantArray, "cpu": cpu.PackedArray}
    for kernels, kind in kinds.items():
        up = load_model(folder, kernels=kernels).params["layers"][0]["up"]
        # Four bits, and 16 of scale and 32 of minimum to 32 columns.
        assert isinstance(up, kind) and up.nbytes == up.size * (4 + 48 / 32) / 8


@pytest.mark.reference
def test_the_cpu_kernels_widen_small_floats_and_say_so(written, caplog) -> None:
    folder, _ = written("fp8")
    small = load_model(folder, kernels="xla").params["layers"]
    assert small[0]["up"].codes.dtype == "float8_e4m3fn" and not caplog.records
    wide = load_model(folder, kernels="cpu").params["layers"]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(wide)} == {"float32"}
    (record,) = caplog.records
    assert "7 matrices of 8-bit floats" in record.getMessage()


@pytest.mark.reference
def test_experts_of_several_formats_are_named(written, tmp_path) -> None:
    folder, _ = written("fp8-experts")
    shutil.copytree(folder, tmp_path / "mixed")
    file = tmp_path / "mixed" / "model.safetensors"
    checkpoint = SafetensorsCheckpoint.open(folder, ["F8_E4M3"])
    tensors = {tensor: checkpoint.load(tensor) for tensor in checkpoint.tensors}
    name = "model.layers.0.block_sparse_moe.experts.2.w1.weight"
    tensors[f"{name}_scale_inv"] = tensors[f"{name}_scale_inv"].astype(ml_dtypes.bfloat16)
    save_file(tensors, file)
    with pytest.raises(StokerError, match=rf"'{name}' is of another format"):
        load_model(tmp_path / "mixed", kernels="xla")


@pytest.mark.reference
@pytest.mark.parametrize("name", ["awq", "gptq", "fp8", "mxfp4", "nvfp4", "pack4-experts"])
def test_stokers_own_files_hold_the_same(name: str, written, tmp_path) -> None:
    folder, _ = written(name)
    convert_model(folder, tmp_path / "own")
    ours, theirs = (load_model(it, kernels="xla").params for it in (tmp_path / "own", folder))
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_array_equal(mine, other)
