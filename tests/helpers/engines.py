"""Engines on tiny models, and ways of asking them."""

from __future__ import annotations

import dataclasses

import numpy as np
from tiny import TINY, random_params, tiny_model, variant

from stoker.engine.engine import Engine
from stoker.engine.replies import Reply
from stoker.engine.sampling_params import SamplingParams
from stoker.engine.shapes import Shapes
from stoker.models.config import Kernels
from stoker.models.loading import Model
from stoker.models.random_weights import random_weights

RNG = np.random.default_rng(11)
PROMPT = RNG.integers(0, 512, 45).tolist()
CONTEXT = 128
#: Few programs, since each takes a second to compile; other sizes have tests of their own.
FEW = Shapes(decode=(1, 32), rows=(64,), sequences=(32,), score=64)
FOUR = Shapes(decode=(4,), rows=(64,), sequences=(4,), score=64)


def quantised() -> Model:
    """As the commands run a checkpoint on a CPU: 4-bit weights, int8 activations, bfloat16 KV."""
    kernels = Kernels("cpu", "int8")
    config = dataclasses.replace(TINY, kernels=kernels, kv_dtype="bfloat16")
    return tiny_model(config, random_weights(config, "int4"))


def exact() -> Model:
    config = variant("plain", "cpu")
    return tiny_model(config, random_params(config))


MODELS = {"float32": exact, "int4": quantised}

GREEDY = SamplingParams(max_tokens=24, logprobs=5)
SEEDED = SamplingParams(max_tokens=24, logprobs=5, temperature=1.0, top_p=0.9, seed=3)
PENALISED = dataclasses.replace(
    SEEDED, repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.3, min_p=0.02
)
WAYS = {"greedy": GREEDY, "seeded": SEEDED, "penalised": PENALISED}


def equal(reply: Reply, expected: Reply) -> None:
    """Ids, log-probabilities and alternatives, bit for bit: they are what logits show of them."""
    assert reply.error is None
    for got, wanted in zip(reply.choices, expected.choices, strict=True):
        assert got.ids == wanted.ids
        assert got.logprobs == wanted.logprobs
        assert got.alternatives == wanted.alternatives
        assert got.finish_reason == wanted.finish_reason


def noise(count: int) -> list[tuple[list[int], SamplingParams]]:
    """Requests of all kinds and lengths."""
    requests = []
    for _ in range(count):
        length = int(RNG.integers(1, 90))
        params = SamplingParams(
            max_tokens=int(RNG.integers(1, 30)),
            temperature=float(RNG.choice([0.0, 0.7, 1.5])),
            top_k=int(RNG.integers(0, 50)),
            seed=int(RNG.integers(1000)),
            repetition_penalty=float(RNG.choice([1.0, 1.3])),
        )
        requests.append((RNG.integers(0, 512, length).tolist(), params))
    return requests


def finish(engine: Engine) -> None:
    while engine.unfinished:
        engine.step()
