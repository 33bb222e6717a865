"""Every family from Hugging Face's files: logits equal transformers' in float32."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hf_models import make, reference_logits, write
from running import CASES, CHUNK, LENGTH, logits_of, token_ids

from stoker.models.loading import load_model


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """A model's folder and transformers' logits, by the name of its case."""

    @functools.cache
    def made(name: str):
        model = make(CASES[name])
        folder = write(model, tmp_path_factory.mktemp(name))
        return folder, reference_logits(model, token_ids())

    return made


@pytest.mark.reference
@pytest.mark.parametrize("kernels", ["xla", "cpu"])
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, kernels: str, reference) -> None:
    folder, expected = reference(name)
    model = load_model(folder, kernels=kernels, activations="float32")
    expected = expected[LENGTH - 1 :]
    whole = logits_of(model, LENGTH)
    np.testing.assert_allclose(whole, expected, atol=1e-4, rtol=0)
    np.testing.assert_allclose(logits_of(model, CHUNK), expected, atol=1e-4, rtol=0)
