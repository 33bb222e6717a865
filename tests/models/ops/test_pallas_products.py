"""Quantised products as the TPU and GPU kernels do them, interpreted, against float64."""

from __future__ import annotations

import dataclasses
import importlib
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products import (
    BFLOAT16,
    FLOAT32,
    activations,
    check,
    check_grouped,
    check_integers,
    device,
    experts,
)
from quantised import FORMATS, NARROW, WIDE, random_levels, random_quant

from stoker.models.errors import StokerError
from stoker.models.ops import gpu, tpu
from stoker.models.quantized import QuantArray, dequantize, ready

ODD = ("group_24", "group_12")


@pytest.fixture(params=["tpu", "gpu"])
def kernels(request: pytest.FixtureRequest) -> ModuleType:
    """Whose products run."""
    return {"tpu": tpu, "gpu": gpu}[request.param]


def loaded(weight: Any, kernels: ModuleType) -> Any:
    """As loading leaves a weight for these kernels."""
    return ready(weight) if kernels is tpu else weight


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ODD])
def test_formats_of_files(name: str, kernels: ModuleType) -> None:
    weight = loaded(device(random_quant(name, 40)), kernels)
    check(kernels, activations(5, weight.shape[1]), weight, FLOAT32)


@pytest.mark.parametrize("name", ODD)
def test_odd_groups_are_refused_by_name(name: str, kernels: ModuleType) -> None:
    weight = device(random_quant(name, 8))
    reason = "do not fit registers" if kernels is tpu else "no multiple of 16"
    assert reason in str(kernels.why_unsupported(weight))
    with pytest.raises(StokerError, match="kernels='xla'"):
        kernels.matmul(activations(1, weight.shape[1]), weight, interpret=True)


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_four_bit_floats(kind: str, kernels: ModuleType) -> None:
    weight = device(random_levels(kind, 24))
    check(kernels, activations(3, weight.shape[1]), weight, FLOAT32)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_eight_bit_floats(dtype: str, kernels: ModuleType) -> None:
    rng = np.random.default_rng(0)
    codes = jnp.asarray(rng.normal(size=(16, 512)), dtype)
    scale = jnp.asarray(rng.uniform(0.5, 2, (16, 4)), jnp.bfloat16)
    check(kernels, activations(3, 512), QuantArray(codes, scale, bits=8, group=128), FLOAT32)


@pytest.mark.parametrize("rows", [1, 17, 700])
def test_any_number_of_rows_and_several_blocks_of_outputs(rows: int, kernels: ModuleType) -> None:
    weight = loaded(device(random_quant("q4_1", 700)), kernels)
    check(kernels, activations(rows, weight.shape[1]), weight, FLOAT32)


def test_bfloat16_rounds_weights_as_the_reference_does(kernels: ModuleType) -> None:
    weight = loaded(device(random_quant("q4_k", 64)), kernels)
    check(kernels, activations(9, weight.shape[1], "bfloat16"), weight, BFLOAT16)


def test_long_rows_are_split_between_programs_of_a_gpu() -> None:
    weight = device(random_quant("long_row", 24))
    check(gpu, activations(1, weight.shape[1]), weight, FLOAT32)


def test_scales_below_the_least_normal_float16_on_a_tpu() -> None:
    tiny = dataclasses.replace(
        random_quant("q8_0", 8),
        scale=np.resize(np.array([2**-24, 3e-5, -6e-8, 6.2e-5, 0], np.float16), (8, 3)),
    )
    check(tpu, activations(2, tiny.shape[1]), ready(device(tiny)), FLOAT32)


def test_ready_weights_stand_for_the_same_numbers() -> None:
    plain = random_quant("q4_k", 8)
    turned = ready(plain)
    assert {leaf.dtype for leaf in jax.tree.leaves(turned)} == {
        np.dtype(np.uint8),
        np.dtype(np.int16),
    }
    np.testing.assert_array_equal(dequantize(device(turned)), dequantize(device(plain)))
    assert ready(turned).scale is turned.scale
    short = random_quant("q4_1", 8)
    assert ready(short).shape == short.shape
    assert ready(short).codes.shape == (8, 128)
    assert ready(short).row_bytes == 80
    np.testing.assert_array_equal(dequantize(device(ready(short))), dequantize(device(short)))


@pytest.mark.parametrize("sizes", [[3, 0, 5, 1], [0, 0, 0, 9], [9, 0, 0, 0]])
def test_groups(sizes: list[int], kernels: ModuleType) -> None:
    weight = loaded(experts("q4_1", 4, 40), kernels)
    check_grouped(kernels, activations(9, weight.shape[-1]), weight, sizes)


def test_groups_that_cross_blocks_of_rows(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = jnp.asarray(np.random.default_rng(0).normal(size=(5, 24, 256)), jnp.float32)
    # A TPU's blocks hold more rows than are worth interpreting.
    monkeypatch.setattr(importlib.import_module("stoker.models.ops.tpu.matmul"), "_ROWS", 128)
    check_grouped(kernels, activations(400, 256), weight, [100, 0, 57, 128, 115])


def test_matrices_of_idle_groups_are_not_read(kernels: ModuleType) -> None:
    weight = jnp.ones((3, 8, 128), jnp.float32).at[1].set(jnp.nan)
    check_grouped(kernels, activations(6, 128), weight, [4, 0, 2])


@pytest.mark.parametrize("name", [*WIDE, *NARROW])
def test_rounded_rows_and_codes_are_multiplied_as_integers(name: str, kernels: ModuleType) -> None:
    weight = loaded(device(random_quant(name, 48)), kernels)
    if name in NARROW and kernels is tpu:
        with pytest.raises(StokerError, match="activations='float32'"):
            kernels.integer_matmul(activations(1, weight.shape[1]), weight, interpret=True)
    else:
        check_integers(kernels, activations(133, weight.shape[1]), weight)


def test_integers_of_groups(kernels: ModuleType) -> None:
    weight = loaded(experts("awq", 3, 16), kernels)
    check_grouped(kernels, activations(142, 384), weight, [5, 0, 137], integers=True)


def test_what_integers_do_not_serve_is_refused_by_name(kernels: ModuleType) -> None:
    for array in (random_quant("q4_0", 8), random_quant("q4_k", 8), random_levels("mxfp4", 8)):
        weight = device(array)
        with pytest.raises(StokerError, match="cannot be multiplied as integers"):
            kernels.integer_matmul(activations(1, weight.shape[1]), weight, interpret=True)
