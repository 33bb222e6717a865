"""A model with latent attention through the whole engine, against one pass over the same tokens."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from driving import chunk, decoding, new_state, page_table
from engines import CONTEXT, FOUR, PROMPT, RNG, SEEDED, equal, finish
from tiny import DEEPSEEK, KERNELS, random_params, tiny_model

from stoker.engine import steps
from stoker.engine.cache import new_cache, token_bytes
from stoker.engine.engine import Engine
from stoker.engine.programs import cache_copies, compile_step
from stoker.engine.replies import Reply
from stoker.engine.sampling_params import SamplingParams
from stoker.engine.shapes import Shapes
from stoker.models.config import Kernels
from stoker.models.loading import Model
from stoker.models.random_weights import architecture

GREEDY = SamplingParams(max_tokens=24, logprobs=0)
LONG = dataclasses.replace(GREEDY, max_tokens=70)


PARAMS = random_params(DEEPSEEK)


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model(dataclasses.replace(DEEPSEEK, kernels=KERNELS["cpu"]), PARAMS)


@pytest.fixture(scope="module")
def engine(model: Model) -> Engine:
    """Too few pages for four long sequences."""
    return Engine(model, slots=4, context=CONTEXT, shapes=FOUR, pages=8, step_tokens=20)


@pytest.fixture(scope="module")
def score(model: Model):
    """Log-probabilities `[128, V]` after each of up to 128 tokens, all run in one chunk."""

    @jax.jit
    def run(tokens, length):
        table = page_table(1, 8)
        batch = chunk([[0]], [0], table)
        batch = batch.replace(tokens=tokens, query_start=jnp.stack([0 * length, length]))
        layout = steps.prefill_layout(batch)
        cache = new_cache(model.config, 8)
        _, x = steps.decoder(model.params, cache, tokens, layout, model.config)
        return jax.nn.log_softmax(steps.head(model.params, x, model.config))

    def whole(ids: list[int]) -> np.ndarray:
        return np.asarray(run(np.array(ids + [0] * (128 - len(ids)), np.int32), np.int32(len(ids))))

    return whole


def follows(reply: Reply, prompt: list[int], score) -> None:
    """Every token of a reply is the likeliest after all before it, with the same probability."""
    assert reply.error is None and len(reply.ids) >= 24
    logprobs = score(prompt + reply.ids)
    at = np.arange(len(prompt) - 1, len(prompt) + len(reply.ids) - 1)
    assert reply.ids == logprobs[at].argmax(-1).tolist()
    np.testing.assert_allclose(reply.choices[0].logprobs, logprobs[at, reply.ids], atol=1e-4)


def test_replies_are_those_of_one_pass(engine: Engine, score) -> None:
    """Beside others, in chunks, and from the prefix cache."""
    prompts = [PROMPT, PROMPT[:7], PROMPT[3:30]]
    for reply, prompt in zip(engine.generate(prompts, GREEDY), prompts, strict=True):
        follows(reply, prompt, score)
    assert engine.pages.used == 0
    (again,) = engine.generate([PROMPT], GREEDY)
    assert again.cached_tokens >= 32
    follows(again, PROMPT, score)


def test_neighbours_change_no_bit() -> None:
    """Alone in whole steps, and among others in chunks."""
    config = dataclasses.replace(DEEPSEEK, kernels=KERNELS["cpu"])
    model = tiny_model(config, PARAMS)
    shapes = Shapes(decode=(1,), rows=(128,), sequences=(1,), score=64)
    alone = Engine(model, slots=1, context=CONTEXT, prefix_cache=False, shapes=shapes)
    engine = Engine(model, slots=4, context=CONTEXT, shapes=FOUR, step_tokens=20)
    prompts = [PROMPT[:7], PROMPT, PROMPT[3:30]]
    for reply, prompt in zip(engine.generate(prompts, SEEDED), prompts, strict=True):
        (expected,) = alone.generate([prompt], SEEDED)
        equal(reply, expected)


def test_preemption_changes_nothing(engine: Engine, score) -> None:
    engine.reset_prefix_cache()
    before = engine.stats.preemptions
    reply = engine.add(PROMPT, LONG)
    while not reply.done:
        alone = (engine.running, engine.waiting) == (1, 0) and reply.ids
        if alone and engine.stats.preemptions < before + 2:
            prompt = RNG.integers(0, 512, 10).tolist()
            engine.add(prompt, SamplingParams(max_tokens=100), priority=1)
        engine.step()
    finish(engine)
    assert reply.choices[0].preemptions >= 2
    follows(reply, PROMPT, score)
    assert engine.pages.used == 0


@pytest.mark.parametrize(("step", "kernels"), [("prefill", "cpu"), ("decode", "xla")])
def test_donated_pages_are_never_copied(step: str, kernels: str) -> None:
    config = dataclasses.replace(DEEPSEEK, kernels=KERNELS[kernels])
    table = page_table(2, 8)
    cache, state = new_cache(config, 16), new_state([SamplingParams()] * 2)
    batch = chunk([PROMPT[:9], PROMPT[:7]], [0, 0], table)
    batch = batch if step == "prefill" else decoding([True, True], table)
    arguments = (PARAMS, cache, state, batch)
    program = compile_step(getattr(steps, step), config, *arguments)
    assert cache_copies(program, cache) == []
    before = [pages.unsafe_buffer_pointer() for pages in jax.tree.leaves(cache)]
    new, *_ = program(*arguments)
    assert [pages.unsafe_buffer_pointer() for pages in jax.tree.leaves(new)] == before


def test_a_token_takes_one_latent_vector_in_each_layer() -> None:
    assert token_bytes(DEEPSEEK) == 2 * (32 + 8) * 4
    cache = new_cache(DEEPSEEK, 9, 16)
    assert [pages.shape for layer in cache for pages in layer] == [(10, 16, 40)] * 2
    published = dataclasses.replace(architecture("deepseek-v3"), kv_dtype="bfloat16")
    assert token_bytes(published) == 61 * 576 * 2


def test_pages_are_as_wide_as_lanes_on_tpus() -> None:
    """Vectors of 40 numbers lie in 128 there (`test_pallas.py` runs a whole model on them)."""
    own = dataclasses.replace(DEEPSEEK, kernels=Kernels("tpu"))
    width = own.latent.width
    assert new_cache(own, 4, 16)[0][0].shape[-1] == 128 > width
    assert new_cache(DEEPSEEK, 4, 16)[0][0].shape[-1] == width
