"""SmolLM2 from its GGUF against Hugging Face's float32 model on the same dequantised weights."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from driving import prompt_logits
from tiny import hf_logits

from stoker.engine.engine import Engine
from stoker.engine.sampling_params import SamplingParams
from stoker.models.loading import Model, load_model
from stoker.models.tokenizers import encode_chat

LICENSE = pathlib.Path(__file__).parents[2] / "LICENSE"
PROMPTS = {
    "fact": "The capital of France is",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "numbers": "1, 2, 3, 5, 8, 13, 21, 34,",
    "unicode": "Le café coûte 3 € — 東京の天気は晴れです 🌞",
    "long": LICENSE.read_text()[:6000],
}


SCORING = SamplingParams(max_tokens=0, prompt_logprobs=0)


@pytest.fixture(scope="module")
def reference(smollm2_path: pathlib.Path) -> Any:
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="module")
def compiled(smollm2_path: pathlib.Path) -> Model:
    """With the CPU kernels, and activations as they are."""
    return load_model(smollm2_path, kernels="cpu", activations="float32")


@pytest.fixture(scope="module")
def plain(smollm2_path: pathlib.Path) -> Model:
    """With plain XLA."""
    return load_model(smollm2_path, kernels="xla")


@pytest.mark.reference
@pytest.mark.parametrize(
    ("name", "kernels"),
    [*((name, "compiled") for name in [*PROMPTS, "chat"]), ("fact", "plain")],
)
def test_logprobs_and_greedy_tokens_equal_hugging_face(
    name: str, kernels: str, request: pytest.FixtureRequest, reference: Any
) -> None:
    smollm2: Model = request.getfixturevalue(kernels)
    assert smollm2.config.dtype == "float32"
    engine = Engine(smollm2, slots=1, context=2048)
    if name == "chat":
        messages = [{"role": "user", "content": "Name three rivers of Europe."}]
        ids = encode_chat(smollm2.tokenizer, messages)
    else:
        ids = smollm2.tokenizer.encode(PROMPTS[name])
    assert name != "long" or len(ids) > 1000
    greedy = SamplingParams(max_tokens=48 if kernels == "compiled" else 8, ignore_eos=True)
    reply = engine.generate([ids], greedy)[0].choices[0]
    whole = [*ids, *reply.ids]
    expected = np.asarray(jax.nn.log_softmax(hf_logits(reference, whole), axis=-1))

    wanted = expected[np.arange(len(whole) - 1), whole[1:]]
    scores = engine.generate([whole], SCORING)[0].prompt_logprobs
    assert np.abs(np.array(scores[1:]) - wanted).max() <= 1e-3
    assert np.abs(np.array(reply.logprobs) - wanted[len(ids) - 1 :]).max() <= 1e-3

    for token, row in zip(reply.ids, expected[len(ids) - 1 :], strict=False):
        second, first = np.sort(row)[-2:]
        assert token == row.argmax() or first - second <= 1e-3


@pytest.mark.reference
@pytest.mark.parametrize("kernels", ["compiled", "plain"])
def test_whole_distribution_equals_hugging_face(
    kernels: str, request: pytest.FixtureRequest, reference: Any
) -> None:
    smollm2: Model = request.getfixturevalue(kernels)
    ids = smollm2.tokenizer.encode(PROMPTS["unicode"])
    expected = jax.nn.log_softmax(hf_logits(reference, ids)[-1])
    logits, _ = prompt_logits(smollm2.params, smollm2.config, ids, 20)
    assert np.abs(jax.nn.log_softmax(logits) - expected).max() <= 1e-3


@pytest.mark.parametrize(("kernels", "sizes"), [("compiled", (1, 7, 16, 64)), ("plain", (7,))])
def test_chunk_sizes_give_the_same_logits(
    kernels: str, sizes: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    smollm2: Model = request.getfixturevalue(kernels)
    ids = smollm2.tokenizer.encode(PROMPTS["fact"] + PROMPTS["code"] + PROMPTS["numbers"] * 2)
    whole, _ = prompt_logits(smollm2.params, smollm2.config, ids, len(ids))
    for size in sizes:
        logits, _ = prompt_logits(smollm2.params, smollm2.config, ids, size)
        np.testing.assert_allclose(logits, whole, atol=1e-4)


def test_int8_activations_keep_perplexity(smollm2: Model, compiled: Model) -> None:
    """With a bfloat16 cache, within 1% of exact ones on 2,000 tokens; never bitwise the same."""
    ids = smollm2.tokenizer.encode(LICENSE.read_text())
    assert smollm2.config.kernels.activations == "int8"
    assert smollm2.config.kv_dtype == "bfloat16"
    assert compiled.config.kv_dtype == "float32"
    assert len(ids) > 2000
    means = [
        np.mean(
            Engine(model, slots=1, context=4096).generate([ids], SCORING)[0].prompt_logprobs[1:]
        )
        for model in (smollm2, compiled)
    ]
    assert 0 < abs(np.exp(means[1] - means[0]) - 1) < 0.01


def test_bfloat16_agrees_on_an_easy_answer(smollm2: Model) -> None:
    config = dataclasses.replace(smollm2.config, dtype="bfloat16", kv_dtype="bfloat16")
    engine = Engine(dataclasses.replace(smollm2, config=config), slots=1, context=256)
    assert "Paris" in engine.generate([PROMPTS["fact"]], SamplingParams(max_tokens=2))[0].text
