"""Models of every family through `stoker convert`: the same parameters and logits, bit by bit."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hf_models import make, write
from running import CASES, logits_of

from stoker.models.checkpoints.converting import convert_model
from stoker.models.checkpoints.inspection import inspect_model
from stoker.models.loading import Model, load_model
from stoker.models.parameters import abstract_params, count_bytes, count_elements

pytestmark = pytest.mark.reference

#: Of each kind of attention and MLP, one that is run too.
RUN = ("llama-biases", "gemma3", "phi3-long", "deepseek-v3", "gpt-oss")


def same(one: Model, other: Model) -> None:
    assert one.config == other.config
    assert jax.tree.structure(one.params) == jax.tree.structure(other.params)
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert one.tokenizer.encode("the theme of 7") == other.tokenizer.encode("the theme of 7")
    assert one.tokenizer.stop_ids == other.tokenizer.stop_ids


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_those_of_the_folder(name, tmp_path):
    folder = write(make(CASES[name]), tmp_path / "folder")
    direct = load_model(folder)
    converted = convert_model(folder, tmp_path / "native").path
    native = load_model(converted)
    same(direct, native)
    for path in (folder, converted):
        report = inspect_model(path)
        assert report.total.parameters == count_elements(abstract_params(direct.config))
        assert report.total.loaded_bytes == count_bytes(direct.params)
    if name in RUN:
        np.testing.assert_array_equal(logits_of(direct, 32), logits_of(native, 32))
        restored = load_model(convert_model(converted, tmp_path / "orbax", to="orbax").path)
        same(direct, restored)
        # Quantised as it is loaded, or before.
        kept = convert_model(folder, tmp_path / "int8", quantize="int8").path
        same(load_model(folder, quantize="int8"), load_model(kept))
