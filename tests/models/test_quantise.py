"""Quantisation of dense matrices: against brute force, transformers and GGUF's own quantiser."""

from __future__ import annotations

import dataclasses
import json

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from gguf_files import Tiny, hf_weights, write_gguf
from hf_models import make, reference_logits, write, write_tokenizer
from load_memory import load_growth
from running import CASES, logits_of, token_ids
from safetensors.numpy import save_file

from stoker.models.checkpoints.gguf import GGUFCheckpoint
from stoker.models.errors import StokerError
from stoker.models.loading import load_model
from stoker.models.ops import cpu
from stoker.models.parameters import is_weight
from stoker.models.placing.cutting import part_of
from stoker.models.quantise import Quantisation, quantise, relative_error
from stoker.models.quantized import QuantArray, dequantize

SPECS = ["int8", "int8:group=64", "int4", "int4:group=64", "int4:minimum=false", "int4:group=128"]


def normal(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.02, (rows, columns)).astype(np.float32)


def error(array: np.ndarray, spec: str) -> float:
    quantised = quantise(array, Quantisation.parse(spec))
    return relative_error(array.astype(np.float32), np.asarray(dequantize(quantised)))


@pytest.mark.parametrize("spec", SPECS)
def test_the_search_errs_less_than_the_range_and_codes_are_the_nearest(spec):
    array = normal(48, 256)
    how = Quantisation.parse(spec)
    found = quantise(array, how)
    dense = np.asarray(dequantize(found))
    plain = error(array, f"{spec}{',' if ':' in spec else ':'}search=false")
    assert relative_error(array, dense) < plain
    # No other code of the group's grid is nearer, as far as float32 can tell.
    scale = np.repeat(np.abs(found.scale.astype(np.float32)), how.group, axis=-1)
    inside = np.abs(array - dense) <= scale * 0.5001
    highest = 127 if how.bits == 8 else 15
    codes = np.asarray(dequantize(dataclasses.replace(found, **unit_scales(found))))
    codes = codes + (0 if how.bits == 8 else found.zero_point)
    clipped = (codes <= (-127 if how.bits == 8 else 0)) | (codes >= highest)
    assert np.all(inside | clipped)


def unit_scales(array: QuantArray) -> dict:
    ones = np.ones_like(array.scale)
    return {"scale": ones, "minimum": None if array.minimum is None else 0 * ones}


def test_four_bits_with_minimum_are_near_the_best_of_a_dense_grid():
    """One group of 8 columns, against every pair of a fine grid of scales and minima."""
    x = normal(1, 8, seed=5)[0]
    scales = np.linspace(0.6, 1.3, 141)[:, None, None] * np.ptp(x) / 15
    minima = x.min() + np.linspace(-1.5, 1.5, 121)[None, :, None] * np.ptp(x) / 15
    codes = np.clip(np.round((x - minima) / scales), 0, 15)
    best = np.sqrt(np.min(np.sum((x - minima - scales * codes) ** 2, axis=-1)) / np.sum(x**2))
    assert error(x[None], "int4:group=8") < 1.5 * best
    assert error(x[None], "int4:group=8,search=false") > 1.5 * best


@pytest.mark.parametrize(
    ("spec", "kind"), [("int8:search=false", "Q8_0"), ("int4:minimum=false,search=false", "Q4_0")]
)
def test_without_search_it_errs_like_ggufs_quantiser(spec, kind):
    array = normal(48, 256)
    kind = gguf.GGMLQuantizationType[kind]
    theirs = gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)
    assert error(array, spec) == pytest.approx(relative_error(array, theirs), rel=0.02)


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        *((spec, np.float32) for spec in SPECS[:5]),
        ("int8", ml_dtypes.bfloat16),
        ("int4", np.float16),
    ],
)
def test_what_lies_on_a_grid_is_kept(spec, dtype):
    """Small whole numbers times a power of two; every group spans its range."""
    how = Quantisation.parse(spec)
    low, high = (-127, 127) if how.bits == 8 else (-8, 7)
    codes = np.random.default_rng(1).integers(low, high + 1, (48, 256))
    codes[:, ::8], codes[:, 1::8] = low, high
    array = (codes * 2.0**-9).astype(dtype)
    np.testing.assert_array_equal(np.asarray(dequantize(quantise(array, how))), array)


@pytest.mark.parametrize("spec", SPECS[:5])
def test_zeros_constants_and_experts(spec):
    array = np.zeros((3, 16, 256), np.float32)
    array[1] = 0.25
    array[2, 1, 5] = -1e-3
    quantised = quantise(array, Quantisation.parse(spec))
    assert quantised.shape == array.shape
    np.testing.assert_allclose(np.asarray(dequantize(quantised)), array, rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize(
    ("factor", "dtype"), [(1, np.float16), (1e-5, np.float32), (1e9, np.float32)]
)
def test_scales_are_float16_unless_the_range_forbids_it(factor, dtype):
    array = normal(48, 256) * np.float32(factor)
    quantised = quantise(array, Quantisation(8))
    assert quantised.scale.dtype == dtype
    assert relative_error(array, np.asarray(dequantize(quantised))) < 0.006


def test_a_few_dead_groups_do_not_widen_the_scales_of_all():
    array = normal(48, 256)
    array[7, :32] = 1e-9
    assert quantise(array, Quantisation(8)).scale.dtype == np.float16


@pytest.mark.parametrize("spec", ["int4:search=false", "int4:search=false,minimum=false"])
def test_parts_of_rows_get_the_bits_of_the_whole(spec):
    """Rows of 80 columns have groups of 16, though their parts could have longer ones."""
    dense, how = normal(7, 80), Quantisation.parse(spec)
    whole = quantise(dense, how)
    assert (whole.group, how.group_of(32)) == (16, 32)
    for first in (0, 32, 48):
        part = quantise(dense[:, first : first + 32], how, columns=80)
        wanted = part_of(whole, [(0, 7), (first, first + 32)], [7, 32])
        assert jax.tree.structure(part) == jax.tree.structure(wanted)
        jax.tree.map(np.testing.assert_array_equal, part, wanted)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_is_refused(value):
    array = normal(48, 256)
    array[2, 3] = value
    with pytest.raises(StokerError, match="not finite"):
        quantise(array, Quantisation(4))


def test_groups_that_do_not_divide_a_row():
    assert Quantisation(4, 64).group_of(160) == 40
    assert Quantisation(4, 64).group_of(32) == 32
    assert Quantisation(8, 32).group_of(60) == 20
    assert Quantisation(4, 32).group_of(60) == 0
    quantised = quantise(normal(8, 160), Quantisation(4, 64))
    assert quantised.group == 40 and quantised.shape == (8, 160)


@pytest.mark.parametrize(
    "text",
    ["int5", "int8:minimum=true", "int4:group=12", "int4:group=512", "int4:group", "int4:x=1"],
)
def test_what_a_flag_must_not_say(text):
    with pytest.raises(StokerError) as raised:
        Quantisation.parse(text)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["int8", "int4", "int4:group=64,minimum=false,search=false"])
def test_what_is_printed_can_be_parsed(text):
    how = Quantisation.parse(text)
    assert Quantisation.parse(str(how)) == how


@pytest.mark.reference
@pytest.mark.parametrize(
    ("name", "kernels", "spec", "least"),
    [
        ("llama", "cpu", "int8", 0.995),
        ("phi3", "xla", "int8", 0.995),
        ("gemma3", "cpu", "int4", 0.95),
        ("mixtral", "xla", "int8", 0.98),
    ],
)
def test_quantised_on_load_a_model_is_nearly_itself(name, kernels, spec, least, tmp_path):
    """QNT-04: fused rows, own heads and experts go through it like everything else."""
    reference = make(CASES[name])
    folder = write(reference, tmp_path)
    model = load_model(folder, quantize=spec, kernels=kernels, activations="float32")
    found = jax.tree_util.tree_leaves_with_path(model.params, is_leaf=is_weight)
    for path, leaf in found:
        if is_weight(leaf):
            packed = kernels == "cpu" and leaf.ndim == 2
            assert isinstance(leaf, cpu.PackedArray if packed else QuantArray)
            assert leaf.bits == (8 if spec == "int8" else 4)
        else:
            assert leaf.ndim == 1 or "router" in str(path)
    got, logits = logits_of(model, 75), reference_logits(reference, token_ids())[-6:]
    assert np.corrcoef(got.ravel(), logits.ravel())[0, 1] > least


def test_a_quantised_model_is_refused_from_its_headers(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", Tiny(), quantisation="Q4_0")
    monkeypatch.setattr(GGUFCheckpoint, "load", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(StokerError, match="quantised already"):
        load_model(path, quantize="int8")


def test_paired_rows_are_reordered_with_their_scales(tmp_path):
    weights = hf_weights(Tiny())
    model = load_model(
        write_gguf(tmp_path / "m.gguf", Tiny(), weights), quantize="int8", kernels="xla"
    )
    want = weights["model.layers.0.self_attn.k_proj.weight"]
    found = model.params["layers"][0]["k"]
    assert relative_error(want, np.asarray(dequantize(found))) < 0.01


def test_the_matrix_at_fault_is_named(tmp_path):
    weights = hf_weights(Tiny())
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = np.nan
    with pytest.raises(StokerError, match=r"'layers.1.up' has values that are not finite"):
        load_model(write_gguf(tmp_path / "m.gguf", Tiny(), weights), quantize="int8")


@pytest.mark.parametrize("kernels", ["xla", "cpu"])
def test_quantising_takes_the_result_and_one_tensor(kernels, tmp_path):
    """The file is twice the result; a matrix of it is 8 MB."""
    V, D, F, L = 2048, 1024, 4096, 4
    rng = np.random.default_rng(0)
    at = "model.layers.{}."
    shapes = {f"{at}self_attn.{name}_proj.weight": (D, D) for name in "qkvo"}
    shapes |= {f"{at}mlp.{name}_proj.weight": (F, D) for name in ("gate", "up")}
    shapes |= {f"{at}mlp.down_proj.weight": (D, F)}
    shapes |= {f"{at}{name}_layernorm.weight": (D,) for name in ("input", "post_attention")}
    shapes = {name.format(i): shape for name, shape in shapes.items() for i in range(L)}
    shapes |= {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    tensors = {
        name: rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
        for name, shape in shapes.items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"model_type": "llama", "vocab_size": V, "hidden_size": D, "intermediate_size": F}
    config |= {"num_hidden_layers": L, "num_attention_heads": 16, "rms_norm_eps": 1e-5}
    config |= {"max_position_embeddings": 256, "tie_word_embeddings": True, "hidden_act": "silu"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_tokenizer(tmp_path, 320)
    grown, file_bytes = load_growth(tmp_path, kernels, "int8")
    result = file_bytes * 8.5 / 16
    assert 0.9 * result < grown < result + 2 * 8.4e6, (grown, result)
