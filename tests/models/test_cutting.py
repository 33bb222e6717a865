"""Columns of quantised matrices in parts: the values of the whole, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from quantised import FORMATS, random_quant

from stoker.models.ops.cpu import can_pack
from stoker.models.placing.cutting import cut_columns, part_of
from stoker.models.quantized import dequantize
from stoker.sharding import Cut, even_cut


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("degree", [2, 3, 8])
def test_parts_hold_the_values_of_the_whole(name: str, degree: int) -> None:
    array = random_quant(name, 5)
    whole = np.asarray(dequantize(array))
    cut = even_cut(whole.shape[1], degree, 4)
    for part, (start, end) in zip(cut_columns(array, cut), cut.ranges, strict=True):
        values = np.asarray(dequantize(part))
        assert part.shape == (5, cut.width) == values.shape
        np.testing.assert_array_equal(values[:, : end - start], whole[:, start:end])
        assert not values[:, end - start :].any()
        assert can_pack(part) or array.levels or not can_pack(array)


def test_groups_are_kept_where_the_cut_allows() -> None:
    array = random_quant("q4_k", 3)
    for part in cut_columns(array, even_cut(512, 2)):
        assert part.group == array.group and part.super_scale is not None
    (first, _) = cut_columns(array, Cut(288, ((0, 288), (288, 512))))
    assert first.group == array.group and first.super_scale is None
    assert cut_columns(array, even_cut(512, 32))[0].group == 16


def test_repeated_and_padded_parts() -> None:
    array = np.arange(12.0).reshape(6, 2)
    spans = ((0, 2), (0, 2), (4, 6), (6, 6))
    parts = [part_of(array, [span, (0, 2)], [3, 2]) for span in spans]
    np.testing.assert_array_equal(parts[0], parts[1])
    np.testing.assert_array_equal(parts[2], [[8, 9], [10, 11], [0, 0]])
    assert parts[3].shape == (3, 2) and not parts[3].any()
