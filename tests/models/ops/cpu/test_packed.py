"""The interleaved layout holds exactly what the quantised array held."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantised import FORMATS, random_floats, random_levels, random_quant

from stoker.models.errors import StokerError
from stoker.models.ops import cpu
from stoker.models.quantized import QuantArray, dequantize


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [16, 37])
def test_values_survive(name: str, rows: int) -> None:
    array = random_quant(name, rows)
    packed = cpu.pack(array)
    assert packed.shape == array.shape
    np.testing.assert_array_equal(dequantize(cpu.unpack(packed)), dequantize(array))


@pytest.mark.parametrize("name", FORMATS)
def test_traced_packing_gives_the_same(name: str) -> None:
    array = jax.tree.map(jnp.asarray, random_quant(name, 20))
    assert jax.tree.all(jax.tree.map(np.array_equal, cpu.pack(array), jax.jit(cpu.pack)(array)))


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q8_0", "q4_k", "q6_k"])
def test_takes_no_more_bytes(name: str) -> None:
    array = random_quant(name, 64)
    assert cpu.pack(array).nbytes <= array.nbytes


def test_rows_are_gathered_under_jit() -> None:
    array = random_quant("q4_k", 40)
    rows = jnp.array([39, 0, 17, 17])
    got = jax.jit(lambda packed, rows: dequantize(packed[rows]))(cpu.pack(array), rows)
    np.testing.assert_array_equal(got, np.asarray(dequantize(array))[np.asarray(rows)])


def test_leading_axes_are_kept() -> None:
    array = random_quant("q4_1", 32)
    stacked = jax.tree.map(lambda leaf: np.stack([leaf, leaf[::-1]]), array)
    packed = cpu.pack(stacked)
    assert packed.shape == (2, *array.shape)
    second = jax.tree.map(lambda leaf: leaf[1], packed)
    np.testing.assert_array_equal(
        dequantize(cpu.unpack(second)), np.asarray(dequantize(array))[::-1]
    )


@pytest.mark.parametrize("name", ["q4_1", "q4_k"])
def test_is_one_array_whose_codes_are_aligned(name: str) -> None:
    packed = cpu.pack(random_quant(name, 16))
    (payload,) = jax.tree.leaves(packed)
    assert payload.dtype == np.uint8
    assert payload.shape[-1] % 64 == 0


def test_odd_groups_are_refused_by_name() -> None:
    array = QuantArray(np.zeros((16, 12), np.int8), np.ones((16, 2), np.float32), group=6)
    assert not cpu.can_pack(array)
    with pytest.raises(StokerError, match=r"\[16, 12\] has 6 columns"):
        cpu.pack(array)


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4", "float16", "bfloat16", "float32"])
def test_levels_become_integers_and_keep_their_values(kind: str) -> None:
    array = random_levels(kind, 37)
    packed = cpu.pack(array)
    assert packed.bits == 4 and len(packed.table) == 16
    np.testing.assert_array_equal(dequantize(cpu.unpack(packed)), dequantize(array))
    traced = jax.jit(cpu.pack)(jax.tree.map(jnp.asarray, array))
    np.testing.assert_array_equal(dequantize(cpu.unpack(traced)), dequantize(array))


def test_powers_of_two_become_halves_where_all_fit() -> None:
    array = random_levels("mxfp4", 37)
    assert cpu.pack(array).record.scale.dtype == "bfloat16"
    scale = np.full_like(array.scale, 2.0**-23)
    scale[5] = 2.0**16
    packed = cpu.pack(dataclasses.replace(array, scale=scale))
    assert packed.record.scale.dtype == "float16"
    # Codes and halves alone: four bits and a half for each element.
    assert packed.nbytes == 48 * 96 * 4.5 / 8
    scale[5] = 2.0**17
    assert cpu.pack(dataclasses.replace(array, scale=scale)).record.scale.dtype == "bfloat16"


def test_levels_far_apart_become_bytes() -> None:
    far = tuple(float(level) for level in range(-127, 113, 15))
    array = dataclasses.replace(random_levels("float32", 37), levels=far)
    packed = cpu.pack(array)
    assert packed.bits == 8 and not packed.table
    np.testing.assert_array_equal(dequantize(cpu.unpack(packed)), dequantize(array))


@pytest.mark.parametrize("name", ["q6_k", "mxfp4"])
def test_stacked_matrices_are_packed_one_by_one(name: str) -> None:
    make = random_levels if name == "mxfp4" else random_quant
    parts = [make(name, 21, seed=seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *parts)
    packed = cpu.pack(stacked)
    assert packed.shape == stacked.shape and isinstance(packed, cpu.PackedArray)
    for part, payload in zip(parts, packed.payload, strict=True):
        np.testing.assert_array_equal(payload, cpu.pack(part).payload)


def test_odd_levels_are_refused() -> None:
    array = dataclasses.replace(random_levels("float32", 16), levels=(0.1,) * 16)
    assert not cpu.can_pack(array)
    with pytest.raises(StokerError, match="no 8-bit integers"):
        cpu.pack(array)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(("scale", "dtype"), [(None, "float32"), (0.25, "bfloat16")])
def test_floats_become_as_wide_as_they_must(scale, dtype, kind) -> None:
    array = random_floats(scale, 37, kind)
    assert not cpu.can_pack(array)
    wide = cpu.prepare(array)
    assert wide.dtype == dtype
    np.testing.assert_array_equal(wide.astype("float32"), dequantize(array))
