"""What a quantised array stands for, against NumPy's own reading of each format."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest
from quantised import random_floats, random_levels

from stoker.models.placing.cutting import cut_columns, part_of
from stoker.models.quantized import dequantize
from stoker.sharding import Cut


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4", "float16", "bfloat16"])
def test_four_bit_floats(kind: str) -> None:
    array = random_levels(kind, 5)
    half = array.group // 2
    scale = np.asarray(array.scale, np.float32)
    if array.super_scale is not None:
        scale = scale * array.super_scale
    blocks = array.codes.reshape(5, -1, half)
    # ml_dtypes has the type itself, one value to a byte.
    values = np.concatenate([blocks & 15, blocks >> 4], axis=-1).view(ml_dtypes.float4_e2m1fn)
    expected = (values.astype(np.float32) * scale[..., None]).reshape(5, -1)
    np.testing.assert_array_equal(dequantize(array), expected)
    np.testing.assert_array_equal(jax.jit(dequantize)(array), expected)
    assert array.shape == (5, 96)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_eight_bit_floats(kind: str) -> None:
    array = random_floats(None, 5, kind)
    expected = array.codes.astype(np.float32) * np.repeat(array.scale, 48, axis=1)
    np.testing.assert_array_equal(dequantize(array), expected)
    rows = np.array([3, 0, 3])
    np.testing.assert_array_equal(dequantize(jax.device_put(array)[rows]), expected[rows])
    assert array.nbytes == 5 * 96 + 5 * 2 * 4


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4", "float8_e4m3fn"])
def test_parts_keep_their_values_and_are_padded_with_zeros(kind: str) -> None:
    """Also where scales are powers of two, among which is no zero."""
    array = random_floats(None, 5, kind) if kind.startswith("float") else random_levels(kind, 5)
    dense = np.pad(np.asarray(dequantize(array)), [(0, 0), (0, 4)])
    cut = Cut(40, ((0, 40), (40, 80), (80, 96)))
    parts = [np.asarray(dequantize(part)) for part in cut_columns(array, cut)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1)[:, :100], dense)
    padded = np.asarray(dequantize(part_of(array, [(0, 5), (0, 96)], [8, 96])))
    np.testing.assert_array_equal(padded, np.pad(dense[:, :96], [(0, 3), (0, 0)]))
