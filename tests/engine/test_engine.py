"""Continuous batching: nothing that happens around a request changes its reply."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from engines import CONTEXT, FOUR, GREEDY, PROMPT, RNG, SEEDED, WAYS, equal, finish, noise
from tiny import random_params, tiny_model, variant

from stoker.engine.engine import Engine
from stoker.engine.sampling_params import SamplingParams
from stoker.models.loading import Model


@pytest.mark.parametrize("way", WAYS)
def test_neighbours_and_slots_change_nothing(engine: Engine, alone: Engine, way: str) -> None:
    """In the first slot, and in one that neighbours leave over."""
    (expected,) = alone.generate([PROMPT], WAYS[way])
    for before in (0, 13, 31):
        engine.reset_prefix_cache()
        requests = noise(31)
        for prompt, params in requests[:before]:
            engine.add(prompt, params)
        for _ in range(before // 6):
            engine.step()
        reply = engine.add(PROMPT, WAYS[way])
        for prompt, params in requests[before:]:
            engine.add(prompt, params)
            engine.step()
        finish(engine)
        equal(reply, expected)
    assert engine.pages.used == 0


@pytest.mark.parametrize("way", WAYS)
def test_a_cache_hit_changes_nothing(engine: Engine, alone: Engine, way: str) -> None:
    (expected,) = alone.generate([PROMPT], WAYS[way])
    engine.reset_prefix_cache()
    first, *others = engine.generate([PROMPT, PROMPT, PROMPT[:40]], WAYS[way])
    assert first.cached_tokens == 0
    assert [reply.cached_tokens for reply in others] == [32, 32]
    equal(first, expected)
    equal(others[0], expected)
    (again,) = engine.generate([PROMPT + expected.ids], WAYS[way])
    # Pages of the reply serve too: all full ones but for the last token.
    assert again.cached_tokens == (len(PROMPT) + len(expected.ids) - 1) // 16 * 16
    (wanted,) = alone.generate([PROMPT + expected.ids], WAYS[way])
    equal(again, wanted)


@pytest.mark.parametrize("step_tokens", [2, 8, 65])
def test_chunks_change_nothing(model: Model, alone: Engine, step_tokens: int) -> None:
    """Prompts cut into chunks of 1 (beside a running reply), 7 and 64."""
    chunked = Engine(
        model,
        slots=step_tokens - 1 if step_tokens < 8 else 2,
        context=CONTEXT,
        step_tokens=step_tokens,
        prefix_cache=False,
    )
    prompt = PROMPT + PROMPT[::-1]
    for params in WAYS.values():
        (expected,) = alone.generate([prompt], params)
        if step_tokens > 2:
            chunked.add([1, 2, 3], SamplingParams(max_tokens=60))
        (reply,) = chunked.generate([prompt], params)
        equal(reply, expected)
        finish(chunked)


@pytest.mark.parametrize("way", WAYS)
def test_preemption_changes_nothing(model: Model, alone: Engine, way: str) -> None:
    """A request of low priority loses its pages to others again and again."""
    tight = Engine(model, slots=4, context=CONTEXT, shapes=FOUR, pages=8)
    params = dataclasses.replace(WAYS[way], max_tokens=70)
    (expected,) = alone.generate([PROMPT], params)
    reply = tight.add(PROMPT, params)
    while not reply.done:
        if (tight.running, tight.waiting) == (1, 0) and reply.ids and tight.stats.preemptions < 2:
            prompt = RNG.integers(0, 512, 10).tolist()
            tight.add(prompt, SamplingParams(max_tokens=100), priority=1)
        tight.step()
    finish(tight)
    assert reply.choices[0].preemptions >= 2
    assert tight.stats.preemptions >= 2
    equal(reply, expected)
    assert tight.pages.used == 0


def test_several_steps_at_once_change_nothing(model: Model, alone: Engine) -> None:
    """Surplus tokens after a stop are discarded, and the pages of the reply stay right."""
    many = Engine(model, slots=4, context=CONTEXT, shapes=FOUR, decode_steps=5)
    for params in WAYS.values():
        (whole,) = alone.generate([PROMPT], params)
        stopping = dataclasses.replace(params, stop_ids=(whole.ids[7],))
        for wanted in (params, stopping):
            replies = many.generate([PROMPT, PROMPT[:20], PROMPT[5:]], wanted)
            for reply, prompt in zip(replies, (PROMPT, PROMPT[:20], PROMPT[5:]), strict=True):
                (expected,) = alone.generate([prompt], wanted)
                equal(reply, expected)
    assert many.stats.surplus_tokens > 0
    assert many.pages.used == 0


@pytest.mark.parametrize("decode_steps", [1, 5])
def test_pages_that_end_with_a_reply(model: Model, alone: Engine, decode_steps: int) -> None:
    """Keys of a reply's last token are never written: who shares the page must not find it full."""
    engine = Engine(model, slots=4, context=CONTEXT, shapes=FOUR, decode_steps=decode_steps)
    tried = 0
    for length in range(17, 31):
        prompt = PROMPT[:length]
        last = 31 - length  # of the reply's tokens, the one that fills the second page
        (whole,) = alone.generate([prompt], SEEDED)
        if whole.ids[last] in whole.ids[:last]:
            continue
        tried += 1
        ending = dataclasses.replace(SEEDED, stop_ids=(whole.ids[last],))
        (reply,) = engine.generate([prompt], ending)
        assert len(reply.ids) == last + 1
        longer = prompt + reply.ids + PROMPT[:5]
        (expected,) = alone.generate([longer], SEEDED)
        equal(*engine.generate([longer], SEEDED), expected)
    assert tried > 5


def test_choices_of_one_prompt_differ_and_come_back(engine: Engine, alone: Engine) -> None:
    """SMP-12: n replies share the prompt's pages; each has a seed of its own."""
    params = dataclasses.replace(SEEDED, n=4)
    engine.reset_prefix_cache()
    (first,) = engine.generate([PROMPT], params)
    (again,) = engine.generate([PROMPT], params)
    (one,) = alone.generate([PROMPT], SEEDED)
    equal(first, again)
    assert first.choices[0].ids == one.ids
    assert len({tuple(choice.ids) for choice in first.choices}) == 4
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    unseeded = dataclasses.replace(SEEDED, seed=None, n=10)
    (reply,) = engine.generate([PROMPT], unseeded)
    assert len({tuple(choice.ids) for choice in reply.choices}) >= 9


def test_salts_do_not_share_pages(engine: Engine) -> None:
    """KV-03."""
    engine.reset_prefix_cache()
    cached = []
    for salt in ("a", "b", "a", None):
        reply = engine.add(PROMPT, GREEDY, salt=salt)
        finish(engine)
        cached.append(reply.cached_tokens)
    assert cached == [0, 0, 32, 0]


def test_prompt_logprobs_are_the_models(engine: Engine, alone: Engine) -> None:
    """Each prompt token after those before it; the first has none; and nothing else changes."""
    params = dataclasses.replace(GREEDY, prompt_logprobs=3)
    engine.generate([PROMPT], GREEDY)  # pages to find, which scoring must not use
    reply, *_ = engine.generate([PROMPT, PROMPT[:9]], [params, SEEDED])
    (plain,) = alone.generate([PROMPT], GREEDY)
    equal(reply, plain)
    assert reply.cached_tokens == 0
    logprobs, alternatives = reply.prompt_logprobs, reply.prompt_alternatives
    assert logprobs is not None and alternatives is not None
    assert logprobs[0] is None and alternatives[0] is None
    for at in (1, 20, len(PROMPT) - 1):
        (after,) = alone.generate([PROMPT[:at]], SamplingParams(max_tokens=1, logprobs=20))
        best = dict(after.choices[0].alternatives[0])
        assert list(alternatives[at]) == list(best.items())[:3]
        if PROMPT[at] in best:
            assert logprobs[at] == best[PROMPT[at]]
    (alone_scored,) = alone.generate([PROMPT], SamplingParams(max_tokens=0, prompt_logprobs=3))
    assert alone_scored.prompt_logprobs == logprobs
    assert (alone_scored.ids, alone_scored.finish_reason) == ([], "length")
    (single,) = alone.generate([[7]], SamplingParams(max_tokens=0, prompt_logprobs=3))
    assert (single.prompt_logprobs, single.finish_reason) == ([None], "length")


def test_nan_fails_one_request_and_nothing_of_it_is_kept() -> None:
    """SMP-07: neighbours go on, and the pages that it filled are not shared."""
    config = variant("plain", "cpu")
    params = random_params(config)
    damaged = dict(params) | {"embedding": params["embedding"].at[13].set(jnp.nan)}
    engine = Engine(tiny_model(config, damaged), slots=4, context=CONTEXT, shapes=FOUR)
    sound = Engine(tiny_model(config, params), slots=4, context=CONTEXT, shapes=FOUR)
    bad = [*range(20, 60), 13, *range(60, 100)]
    prompts = [bad, PROMPT, bad[:41], bad[:30]]
    assert 13 not in PROMPT
    replies = engine.generate(prompts, SamplingParams(max_tokens=8, logprobs=2))
    expected = sound.generate(prompts, SamplingParams(max_tokens=8, logprobs=2))
    for index in (1, 3):
        equal(replies[index], expected[index])
    for index in (0, 2):
        assert replies[index].finish_reason == "error"
        assert "not finite" in str(replies[index].error)
        assert all(0 <= token < 512 for token in replies[index].ids)
    assert engine.stats.finished == {"length": 2, "error": 2}
    assert engine.pages.used == 0
    (scored,) = engine.generate([bad], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert "not finite" in str(scored.error)
    (again,) = engine.generate([[*bad[:41], 5]], SamplingParams(max_tokens=8))
    assert again.finish_reason == "error"


def test_aborts_leave_the_others_alone(engine: Engine, alone: Engine) -> None:
    engine.reset_prefix_cache()
    (expected,) = alone.generate([PROMPT], SEEDED)
    replies = [engine.add(PROMPT, SEEDED) for _ in range(6)]
    replies += [engine.add(PROMPT[:n], GREEDY, request_id=f"other {n}") for n in (3, 40)]
    engine.abort(replies[0].id)
    for _ in range(4):
        engine.step()
    engine.abort(replies[3].id)
    engine.abort("other 40")
    engine.abort("nobody")
    deltas = engine.step()
    assert {d.reply.id for d in deltas if d.finished} == {replies[3].id, "other 40"}
    finish(engine)
    for index in (1, 2, 4, 5):
        equal(replies[index], expected)
    assert [replies[i].finish_reason for i in (0, 3, 7)] == ["abort"] * 3
    assert engine.pages.used == 0


def test_a_steady_step_allocates_nothing_that_stays(model: Model) -> None:
    """Cache and state are written where they lie; only tokens out come, and those read go."""
    engine = Engine(model, slots=4, context=CONTEXT, shapes=FOUR)
    for _ in range(4):
        engine.add(PROMPT[:5], SamplingParams(max_tokens=100))
    for _ in range(10):
        engine.step()

    def lies() -> list[int]:
        kept = (engine.runner.device.cache, engine.runner.device.state)
        return [array.unsafe_buffer_pointer() for array in jax.tree.leaves(kept)]

    before, living = lies(), len(jax.live_arrays())
    for _ in range(40):
        engine.step()
        assert len(jax.live_arrays()) <= living
    assert lies() == before


def test_nothing_compiles_after_warm_up(model: Model) -> None:
    """PAR-04, PAR-06: whatever is asked, the programs are those that were announced."""
    engine = Engine(model, slots=3, context=100, step_tokens=37)
    engine.warmup()
    known = len(engine.runner.programs.compilations)
    shapes = engine.shapes
    assert known == len(shapes.decode) + len(shapes.prefill()) + 2  # score, admit
    compiled = []

    def listener(event: str, seconds: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listener)
    extra = [
        SamplingParams(max_tokens=3, logprobs=20, prompt_logprobs=20, n=2),
        SamplingParams(max_tokens=5, logit_bias={3: 5.0}, min_tokens=2, allowed_ids=(1, 2, 3)),
    ]
    requests = noise(60) + [(PROMPT, params) for params in extra]
    for prompt, params in requests:
        engine.add(prompt, params)
        if RNG.random() < 0.5:
            engine.step()
    finish(engine)
    assert compiled == []
    assert (len(engine.runner.programs.compilations), engine.runner.programs.late) == (known, 0)


def test_a_late_compilation_is_counted(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(model, slots=1, context=64, step_tokens=2)
    engine.warmup()
    engine.runner.programs._programs.clear()
    engine.generate([[1, 2]], SamplingParams(max_tokens=1))
    assert engine.runner.programs.late >= 1
    assert "after warm-up" in caplog.text
