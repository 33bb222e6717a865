"""Products with quantised weights as the GPU kernel does them, interpreted, against float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from products import BFLOAT16, FLOAT32, activations, check, check_grouped, device, experts
from quantised import FORMATS, random_levels, random_quant

from stoker.models.errors import StokerError
from stoker.models.ops import gpu
from stoker.models.quantized import QuantArray

ODD = ("group_24", "group_12")


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ODD])
def test_formats_of_files(name: str) -> None:
    weight = device(random_quant(name, 40))
    check(gpu, activations(5, weight.shape[1]), weight, FLOAT32)


@pytest.mark.parametrize("name", ODD)
def test_odd_groups_are_refused_by_name(name: str) -> None:
    weight = device(random_quant(name, 8))
    assert "no multiple of 16" in str(gpu.why_unsupported(weight))
    with pytest.raises(StokerError, match="kernels='xla'"):
        gpu.matmul(activations(1, weight.shape[1]), weight, interpret=True)


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_four_bit_floats(kind: str) -> None:
    weight = device(random_levels(kind, 24))
    check(gpu, activations(3, weight.shape[1]), weight, FLOAT32)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_eight_bit_floats(dtype: str) -> None:
    rng = np.random.default_rng(0)
    codes = jnp.asarray(rng.normal(size=(16, 512)), dtype)
    scale = jnp.asarray(rng.uniform(0.5, 2, (16, 4)), jnp.bfloat16)
    check(gpu, activations(3, 512), QuantArray(codes, scale, bits=8, group=128), FLOAT32)


@pytest.mark.parametrize("rows", [1, 17, 700])
def test_any_number_of_rows_and_several_blocks_of_ougputs(rows: int) -> None:
    weight = device(random_quant("q4_1", 700))
    check(gpu, activations(rows, weight.shape[1]), weight, FLOAT32)


def test_bfloat16_rounds_weights_as_the_reference_does() -> None:
    weight = device(random_quant("q4_k", 64))
    check(gpu, activations(9, weight.shape[1], "bfloat16"), weight, BFLOAT16)


def test_long_rows_are_split_between_programs() -> None:
    weight = device(random_quant("long_row", 24))
    check(gpu, activations(1, weight.shape[1]), weight, FLOAT32)


@pytest.mark.parametrize("sizes", [[3, 0, 5, 1], [0, 0, 0, 9], [9, 0, 0, 0]])
def test_groups(sizes: list[int]) -> None:
    weight = experts("q4_1", 4, 40)
    check_grouped(gpu, activations(9, weight.shape[-1]), weight, sizes)


def test_groups_that_cross_blocks_of_rows() -> None:
    weight = jnp.asarray(np.random.default_rng(0).normal(size=(5, 24, 256)), jnp.float32)
    check_grouped(gpu, activations(400, 256), weight, [100, 0, 57, 128, 115])


def test_matrices_of_idle_groups_are_not_read() -> None:
    weight = jnp.ones((3, 8, 128), jnp.float32).at[1].set(jnp.nan)
    check_grouped(gpu, activations(6, 128), weight, [4, 0, 2])
