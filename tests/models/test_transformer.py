"""The decoder against Hugging Face's float32 forward pass on the same weights."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from driving import prompt_logits
from tiny import (
    KERNELS,
    TINY,
    VARIANTS,
    hf_logits,
    hugging_face,
    random_params,
    tiny_model,
    variant,
)

from stoker.engine.engine import Engine
from stoker.engine.sampling_params import SamplingParams

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
    engine = Engine(tiny_model(config, params), slots=1, context=256)
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=0)
    scores = engine.generate([IDS], scoring)[0].prompt_logprobs
    reference = np.array(jax.nn.log_softmax(expected, axis=-1))
    wanted = reference[np.arange(len(IDS) - 1), IDS[1:]]
    assert scores[0] is None
    np.testing.assert_allclose(scores[1:], wanted, atol=1e-4)


def test_a_logit_of_sixty_is_capped_once() -> None:
    """CFG-09."""
    params, ids = random_params(TINY), IDS[:20]
    logits, _ = prompt_logits(params, TINY, ids, len(ids))
    params |= {"head": params["head"] * (60 / logits.max())}
    for cap, highest in ((0.0, 60.0), (30.0, 28.9208)):
        config = dataclasses.replace(TINY, logit_softcap=cap)
        logits, _ = prompt_logits(params, config, ids, len(ids))
        assert logits.max() == pytest.approx(highest, abs=1e-3)


@pytest.mark.reference
@pytest.mark.parametrize("name", ["plain", "bias"])
def test_greedy_reply_equals_hugging_face(name: str) -> None:
    config = variant(name)
    params = random_params(config)
    model = hugging_face(config, params)
    engine = Engine(tiny_model(config, params), slots=1, context=256)
    choice = engine.generate([IDS[:40]], SamplingParams(max_tokens=24))[0].choices[0]
    ids = list(IDS[:40])
    for token, logprob in zip(choice.ids, choice.logprobs, strict=True):
        logits = hf_logits(model, ids)[-1]
        assert token == int(logits.argmax())
        assert logprob == pytest.approx(float(jax.nn.log_softmax(logits)[token]), abs=1e-4)
        ids.append(token)
    assert len(ids) == 64
