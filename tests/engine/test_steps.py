"""The pure steps: chunking, neighbours, padding, scan, donation and compile counts."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from driving import chunk, decoding, jitted, new_state, page_table, prompt_logits
from tiny import KERNELS, TINY, random_params, tiny_model, variant

from stoker.engine import steps
from stoker.engine.cache import new_cache
from stoker.engine.engine import Engine
from stoker.engine.pages import pages_for
from stoker.engine.programs import Programs, cache_copies, compile_step
from stoker.engine.sampling_params import SamplingParams
from stoker.models.config import ModelConfig

RNG = np.random.default_rng(3)
PARAMS = random_params(TINY)
PROMPT = RNG.integers(0, 512, 50).tolist()


@pytest.fixture(scope="module", params=KERNELS)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return variant("plain", request.param)


@pytest.fixture(scope="module")
def whole(config: ModelConfig) -> np.ndarray:
    return prompt_logits(PARAMS, config, PROMPT, len(PROMPT))[0]


@pytest.mark.parametrize("size", [1, 7, 16, 17, 49, 64])
def test_any_chunking_gives_the_same_logits(
    config: ModelConfig, size: int, whole: np.ndarray
) -> None:
    logits, _ = prompt_logits(PARAMS, config, PROMPT, size)
    np.testing.assert_allclose(logits, whole, atol=1e-4)


def test_padding_changes_nothing(config: ModelConfig, whole: np.ndarray) -> None:
    logits, _ = prompt_logits(PARAMS, config, PROMPT, 16, padded=40)
    np.testing.assert_allclose(logits, whole, atol=1e-4)


def test_several_prompts_share_a_chunk(config: ModelConfig, whole: np.ndarray) -> None:
    """Slots of unequal lengths, one of them without rows, in one flat batch over two steps."""
    others = [RNG.integers(0, 512, n).tolist() for n in (3, 29)]
    prompts = [others[0], PROMPT, [], others[1]]
    table = page_table(4, 8)
    cache = new_cache(config, 32)
    run = jitted(steps.prefill_logits, config)
    cache, _ = run(PARAMS, cache, chunk([p[:20] for p in prompts], [0] * 4, table, 80))
    cached = [min(len(p), 20) for p in prompts]
    rest = [p[20:] for p in prompts]
    _, logits = run(PARAMS, cache, chunk(rest, cached, table, 80))
    np.testing.assert_allclose(logits[1], whole, atol=1e-4)
    alone, _ = prompt_logits(PARAMS, config, others[1], 29)
    np.testing.assert_allclose(logits[3], alone, atol=1e-4)


def test_decode_goes_on_like_prefill(config: ModelConfig) -> None:
    """Two active slots and an idle one, against running the longer prompts from scratch."""
    table = page_table(3, 8)
    cache = new_cache(config, 24)
    state = new_state([SamplingParams()] * 3)
    batch = chunk([PROMPT[:33], [5, 6], PROMPT[:9]], [0] * 3, table)
    cache, state, outputs = jitted(steps.prefill, config)(PARAMS, cache, state, batch)
    replies = [[int(token)] for token in outputs.tokens]
    idle = state.tokens[1], state.lengths[1]
    active = decoding([True, False, True], table)
    for _ in range(20):
        cache, state, outputs = jitted(steps.decode, config)(PARAMS, cache, state, active)
        for slot in (0, 2):
            replies[slot].append(int(outputs.tokens[slot]))
    assert (state.tokens[1], state.lengths[1]) == idle
    for slot, start in ((0, PROMPT[:33]), (2, PROMPT[:9])):
        for count in (1, 7, 20):
            logits, _ = prompt_logits(PARAMS, config, start + replies[slot][:count], 64)
            assert replies[slot][count] == int(logits.argmax())
    # The idle slot's cache is untouched: going on with it now gives its own reply.
    active = decoding([False, True, False], table)
    cache, state, outputs = jitted(steps.decode, config)(PARAMS, cache, state, active)
    logits, _ = prompt_logits(PARAMS, config, [5, 6, replies[1][0]], 3)
    assert int(outputs.tokens[1]) == int(logits.argmax())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scan_over_decode_equals_the_engine(config: ModelConfig, temperature: float) -> None:
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=11, top_p=0.9)
    engine = Engine(tiny_model(config, PARAMS), slots=1, context=128)
    expected = engine.generate([PROMPT], params)[0].ids
    table = page_table(1, 8)
    cache, state = new_cache(config, 8), new_state([params])
    cache, state, first = jitted(steps.prefill, config)(
        PARAMS, cache, state, chunk([PROMPT], [0], table)
    )
    batch = decoding([True], table)

    @jax.jit
    def scanned(cache, state):
        def body(carry, _):
            cache, state, outputs = steps.decode(PARAMS, *carry, batch, config=config)
            return (cache, state), outputs.tokens[0]

        return jax.lax.scan(body, (cache, state), length=39)

    _, tokens = scanned(cache, state)
    assert [int(first.tokens[0]), *tokens.tolist()] == expected


def test_a_reply_ends_on_the_device(config: ModelConfig) -> None:
    """After an end token a slot stands still, and its neighbour goes on."""
    seeds = [SamplingParams(temperature=1.0, seed=seed) for seed in (11, 12)]
    table = page_table(2, 8)
    many = jitted(functools.partial(steps.decode_steps, steps=6), config)

    def run(requests: list[SamplingParams]) -> tuple[np.ndarray, steps.State, tuple]:
        state = steps.new_state(requests, 512, 256, [len(PROMPT)] * 2)
        batch = chunk([PROMPT, PROMPT], [0, 0], table)
        cache, state, first = jitted(steps.prefill, config)(
            PARAMS, new_cache(config, 16), state, batch
        )
        batch = decoding([True, True], table)
        cache, state, outputs = many(PARAMS, cache, state, batch)
        return np.stack([first.tokens, *outputs.tokens], axis=1), state, cache

    whole, _, cache = run(seeds)
    first, second = whole.tolist()
    assert len(set(first)) == 7
    ending = dataclasses.replace(seeds[0], stop_ids=(first[3],))
    tokens, state, stopped = run([ending, seeds[1]])
    assert tokens[0, :4].tolist() == first[:4] and tokens[1].tolist() == second
    assert state.tokens.tolist() == [first[3], second[6]]
    assert state.lengths.tolist() == [len(PROMPT) + 3, len(PROMPT) + 6]
    # What follows the last token but one is as it was: zeros.
    page, at = table[0, state.lengths[0] // 16], int(state.lengths[0]) % 16
    for written, same in zip(jax.tree.leaves(stopped), jax.tree.leaves(cache), strict=True):
        axis = written.shape[1:].index(16) + 1
        own, others = (np.moveaxis(np.asarray(array), axis, 1)[page] for array in (written, same))
        np.testing.assert_array_equal(own[:at], others[:at])
        assert not own[at:].any() and others[at : at + 3].any()


def test_an_end_token_of_the_prompt_ends_nothing(config: ModelConfig) -> None:
    """A prompt whose last token alone is left goes through `decode`."""
    ending = SamplingParams(stop_ids=(PROMPT[-1],))
    _, cache = prompt_logits(PARAMS, config, PROMPT[:-1], 64)
    batch = decoding([True], page_table(1, pages_for(len(PROMPT) + 63)))
    found = []
    for prompt_len in (len(PROMPT), 0):  # then as if the token had been chosen
        state = steps.new_state([ending], 512, 256, [prompt_len])
        state = dataclasses.replace(
            state,
            tokens=np.array(PROMPT[-1:], np.int32),
            lengths=np.array([len(PROMPT) - 1], np.int32),
        )
        _, state, _ = jitted(steps.decode, config)(PARAMS, cache, state, batch)
        found.append(int(state.lengths[0]))
    assert found == [len(PROMPT), len(PROMPT) - 1]


def test_score_leaves_other_slots_alone(config: ModelConfig) -> None:
    table = page_table(2, 8)
    cache, state = new_cache(config, 16), new_state([SamplingParams()] * 2)
    batch = chunk([[], PROMPT[:9]], [0, 0], table)
    cache, state, _ = jitted(steps.prefill, config)(PARAMS, cache, state, batch)
    batch = chunk([PROMPT[:5], []], [0, 0], table)
    targets = np.zeros(5, np.int32)
    _, after, _ = jitted(steps.score, config)(PARAMS, cache, state, batch, targets)
    assert after.lengths.tolist() == [5, 9]
    assert after.tokens.tolist() == state.tokens.tolist()


def test_decoding_past_the_pages_is_no_silent_overwrite(config: ModelConfig) -> None:
    """The reference gives NaN logits, the CPU kernels an error; neither writes anything."""
    table = page_table(1, 2)
    cache = new_cache(config, 2)
    run = jitted(steps.prefill_logits, config)
    cache, _ = run(PARAMS, cache, chunk([PROMPT[:32]], [0], table))
    before = jax.tree.map(np.array, cache)
    state = new_state([SamplingParams()])
    state = dataclasses.replace(state, lengths=np.array([32], np.int32))
    arguments = (PARAMS, cache, state, decoding([True], table))
    if config.kernels.platform == "cpu":
        with pytest.raises(jax.errors.JaxRuntimeError, match="33 cached tokens"):
            jax.block_until_ready(jitted(steps.decode_logits, config)(*arguments))
    else:
        after, logits = jitted(steps.decode_logits, config)(*arguments)
        assert np.isnan(logits).all()
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            np.testing.assert_array_equal(old[1:], new[1:])


def test_float32_products_are_exact_on_every_platform(config: ModelConfig) -> None:
    """On a TPU or a recent GPU, the default precision would round float32 operands."""
    if config.kernels.platform == "cpu":
        return
    arguments = _step_arguments(config)["prefill"]
    step = functools.partial(steps.prefill, config=config)
    text = jax.jit(step).trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) >= 10
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)


def _step_arguments(config: ModelConfig) -> dict[str, tuple]:
    table = page_table(2, 8)
    cache, state = new_cache(config, 16), new_state([SamplingParams()] * 2)
    batch = chunk([PROMPT[:9], PROMPT[:7]], [0, 0], table)
    return {
        "prefill": (PARAMS, cache, state, batch),
        "decode": (PARAMS, cache, state, decoding([True, True], table)),
        "score": (PARAMS, cache, state, batch, np.zeros(16, np.int32)),
    }


@pytest.mark.parametrize("step", ["prefill", "decode", "score"])
def test_donated_pages_are_never_copied(config: ModelConfig, step: str) -> None:
    """No instruction copies a page buffer, and outputs lie where the inputs lay."""
    arguments = _step_arguments(config)[step]
    cache = arguments[1]
    program = compile_step(getattr(steps, step), config, *arguments)
    assert cache_copies(program, cache) == []
    before = [pages.unsafe_buffer_pointer() for pages in jax.tree.leaves(cache)]
    new, *_ = program(*arguments)
    assert [pages.unsafe_buffer_pointer() for pages in jax.tree.leaves(new)] == before
    assert all(pages.is_deleted() for pages in jax.tree.leaves(cache))


def test_a_copied_page_buffer_is_noticed(config: ModelConfig) -> None:
    """The check above can fail: reading the pages before they are written forces a copy."""
    arguments = _step_arguments(config)["decode"]

    def copying(params, cache, state, batch, *, config, top=0):
        old = cache[0][0].sum()
        cache, state, outputs = steps.decode(params, cache, state, batch, config=config, top=top)
        return cache, state, outputs.replace(logprobs=outputs.logprobs + old + cache[0][0].sum())

    def undonated(params, cache, state, batch, *, config, top=0):
        return jax.tree.map(lambda pages: pages.astype("bfloat16"), cache), state, 0

    assert cache_copies(compile_step(copying, config, *arguments), arguments[1])
    with pytest.raises(RuntimeError, match="refused its donation"):
        Programs(config).prepare(functools.wraps(steps.decode)(undonated), *arguments)
