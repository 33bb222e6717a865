"""Pre-quantised checkpoints hold, value for value, what their formats say."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest
from compressed import COMPRESSED
from hf_models import Case
from prequantised import FORMATS, into_words, quantised
from safetensors.numpy import save_file

from stoker.models.checkpoints.prequantised import open_prequantised
from stoker.models.checkpoints.prequantised.layouts import integers, unpack_words
from stoker.models.quantized import QuantArray, dequantize

ALL = FORMATS | {f"compressed-{name}": format for name, format in COMPRESSED.items()}


@pytest.mark.reference
@pytest.mark.parametrize("name", ALL)
def test_every_matrix_has_the_values_of_its_format(name: str, tmp_path) -> None:
    folder, _, dense = quantised(tmp_path, Case("Llama"), ALL[name])
    checkpoint = open_prequantised(folder, ALL[name].config)
    found = {it for it in checkpoint.tensors if isinstance(checkpoint.load(it), QuantArray)}
    assert found == dense.keys()
    for tensor, expected in dense.items():
        array = checkpoint.load(tensor)
        assert checkpoint.tensors[tensor].shape == array.shape == expected.shape
        np.testing.assert_array_equal(dequantize(array), expected)
        for rows in (slice(3, 11), slice(8, 16), slice(0, 1)):
            part = checkpoint.load(tensor, rows)
            np.testing.assert_array_equal(dequantize(part), expected[rows])
            assert jax.tree.structure(part) == jax.tree.structure(array)
        unit = checkpoint.tensors[tensor].unit
        for first in range(0, expected.shape[1], unit):
            columns = slice(first, first + unit)
            part = checkpoint.load(tensor, slice(3, 11), columns)
            np.testing.assert_array_equal(dequantize(part), expected[3:11, columns])


@pytest.mark.reference
def test_mxfp4_experts_have_the_values_that_transformers_gives_them(tmp_path) -> None:
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(0)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    blocks = rng.integers(0, 256, (3, 10, 2, 16), dtype=np.uint8)
    scales = rng.integers(110, 135, (3, 10, 2), dtype=np.uint8)
    stored = {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(stored, tmp_path / "model.safetensors")
    checkpoint = open_prequantised(
        tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    )
    array = checkpoint.load(name)
    assert array.shape == checkpoint.tensors[name].shape == (3, 10, 64)
    assert array.nbytes == blocks.nbytes + scales.nbytes
    expected = convert_moe_packed_tensors(
        torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32
    )
    expected = expected.numpy().swapaxes(1, 2)
    np.testing.assert_array_equal(dequantize(array), expected)
    np.testing.assert_array_equal(dequantize(checkpoint.load(name, slice(1, 2))), expected[1:2])


@pytest.mark.parametrize("grid", [(3, 2, 2), (3, 1, 1), (3,), (3, 48, 1)])
def test_fp8_experts_in_one_tensor(grid, tmp_path) -> None:
    """With scales for blocks of 32 rows and 48 columns, for experts, and for rows."""
    rng = np.random.default_rng(0)
    name = "model.layers.0.mlp.experts.down_proj"
    codes = rng.normal(0, 30, (3, 48, 64)).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(0.01, 0.02, grid).astype(np.float32)
    save_file({name: codes, f"{name}_scale_inv": scale}, tmp_path / "model.safetensors")
    checkpoint = open_prequantised(tmp_path, {"quant_method": "fp8", "weight_block_size": [32, 48]})
    if grid == (3, 2, 2):
        scale = np.repeat(np.repeat(scale, 32, 1), 48, 2)[:, :48, :64]
    expected = codes.astype(np.float32) * scale.reshape(*scale.shape, *(1,) * (3 - scale.ndim))
    np.testing.assert_array_equal(dequantize(checkpoint.load(name)), expected)
    np.testing.assert_array_equal(dequantize(checkpoint.load(name, slice(1, 2))), expected[1:2])


def test_every_width_of_packed_codes() -> None:
    rng = np.random.default_rng(0)
    for bits in range(1, 9):
        for count in (1, 31, 64, 75):
            values = rng.integers(0, 2**bits, (3, count), dtype=np.uint8)
            np.testing.assert_array_equal(
                unpack_words(into_words(values, bits), bits, count), values
            )


def test_minima_of_float32_scales_are_a_rounding_apart() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (5, 64), dtype=np.uint8)
    scale = rng.uniform(0.01, 0.02, (5, 2)).astype(np.float32)
    zero = rng.integers(0, 256, (5, 2))
    exact = (codes - np.repeat(zero, 32, 1)) * np.repeat(scale.astype(np.float64), 32, 1)
    array = integers(codes, scale, zero, 8, 32)
    np.testing.assert_allclose(dequantize(array), exact, rtol=0, atol=256 * 0.02 * 2**-23)


def test_odd_groups_of_small_codes_take_eight_bits() -> None:
    codes = np.arange(30, dtype=np.uint8).reshape(2, 15) % 16
    array = integers(codes, np.full((2, 3), 0.5, np.float16), 8, 4, 5, symmetric=True)
    assert array.bits == 8
    np.testing.assert_array_equal(dequantize(array), (codes.astype(int) - 8) * 0.5)
