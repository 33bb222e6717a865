"""The decoder against Hugging Face's float32 forward pass on the same weights."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from driving import prompt_logits
from tiny import KERNELS, VARIANTS, hf_logits, hugging_face, random_params, variant

from stoker.engine.sampling_params import SamplingParams
from stoker.engine.session import Session

RNG = np.random.default_rng(7)
IDS = RNG.integers(0, 509, 150).tolist()


@pytest.mark.reference
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_hugging_face(name: str, kernels: str) -> None:
    config = variant(name, kernels)
    params = random_params(config)
    expected = hf_logits(hugging_face(config, params), IDS)
    logits, _ = prompt_logits(params, config, IDS, len(IDS))
    np.testing.assert_allclose(logits, expected[-1], atol=1e-4)
    session = Session(params, config, context=256)
    scores = session.score(IDS)
    reference = np.array(jax.nn.log_softmax(expected, axis=-1))
    wanted = reference[np.arange(len(IDS) - 1), IDS[1:]]
    assert scores[0] is None
    np.testing.assert_allclose(scores[1:], wanted, atol=1e-4)


@pytest.mark.reference
@pytest.mark.parametrize("name", ["plain", "bias"])
def test_greedy_reply_equals_hugging_face(name: str) -> None:
    config = variant(name)
    params = random_params(config)
    model = hugging_face(config, params)
    session = Session(params, config, context=256)
    reply = session.generate(IDS[:40], SamplingParams(max_tokens=24))
    ids = list(IDS[:40])
    for token in reply:
        logits = hf_logits(model, ids)[-1]
        assert token.id == int(logits.argmax())
        assert token.logprob == pytest.approx(float(jax.nn.log_softmax(logits)[token.id]), abs=1e-4)
        ids.append(token.id)
    assert len(ids) == 64
