"""Pre-quantised checkpoints hold, value for value, what their formats say."""

from __future__ import annotations

import numpy as np
import pytest
from compressed import COMPRESSED
from hf_models import Case
from prequantised import FORMATS, quantised

from stoker.models.checkpoints.prequantised import open_prequantised
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
        part = checkpoint.load(tensor, slice(3, 11))
        np.testing.assert_array_equal(dequantize(part), expected[3:11])
