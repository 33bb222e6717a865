"""Continuous batching: nothing that happens around a request changes its reply."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TINY, random_params, tiny_model, variant

from stoker.engine.engine import Engine
from stoker.engine.replies import Reply
from stoker.engine.sampling_params import SamplingParams
from stoker.engine.shapes import Shapes
from stoker.models.config import Kernels
from stoker.models.errors import StokerError
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


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]()


@pytest.fixture(scope="module")
def engine(model: Model) -> Engine:
    """32 slots, and steps so small that prompts are cut and mixed with decodes all the time."""
    return Engine(model, slots=32, context=CONTEXT, shapes=FEW)


@pytest.fixture(scope="module")
def alone(model: Model) -> Engine:
    """One slot, whole prompts, nothing shared."""
    shapes = Shapes(decode=(1,), rows=(128,), sequences=(1,), score=64)
    return Engine(model, slots=1, context=CONTEXT, prefix_cache=False, shapes=shapes)


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


class Interrupted(BaseException):
    """Like Ctrl-C."""


@pytest.mark.parametrize("error", [RuntimeError("the device is gone"), Interrupted()])
@pytest.mark.parametrize("at", ["dispatch", "read"])
def test_a_failed_step_loses_no_request(
    model: Model, alone: Engine, error: BaseException, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the step has taken the donated cache: everything is computed again, to the same end."""
    engine = Engine(model, slots=4, context=CONTEXT, shapes=FOUR)
    prompts = [PROMPT, PROMPT[:5], PROMPT[:33], PROMPT[7:], PROMPT[::-1]]
    original, calls = getattr(engine.runner, at), itertools.count(1)

    def failing(*args: object) -> object:
        result = original(*args)
        if next(calls) in (4, 9):
            raise error
        return result

    monkeypatch.setattr(engine.runner, at, failing)
    replies = [engine.add(prompt, SEEDED) for prompt in prompts]
    raised = 0
    while engine.unfinished:
        try:
            engine.step()
        except Interrupted:
            raised += 1
    for prompt, reply in zip(prompts, replies, strict=True):
        equal(reply, alone.generate([prompt], SEEDED)[0])
    failures = engine.stats.failures
    assert (raised, failures) == ((2, 0) if isinstance(error, Interrupted) else (0, 2))


def test_a_device_that_always_fails_fails_requests_and_not_the_engine(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(model, slots=2, context=CONTEXT, shapes=FOUR)

    def broken(*_: object) -> object:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(engine.runner, "read", broken)
        replies = engine.generate([PROMPT, PROMPT[:3], PROMPT[:7]], GREEDY)
    assert all("out of memory" in str(reply.error) for reply in replies)
    (reply,) = engine.generate([PROMPT], GREEDY)
    assert reply.finish_reason == "length"


def test_host_code_that_fails_is_one_requests_failure(
    engine: Engine, alone: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SRV-14: an exception in what is done for one request."""
    (expected,) = alone.generate([PROMPT], GREEDY)
    victim, other = engine.add(PROMPT[:9], SEEDED), engine.add(PROMPT, GREEDY)
    stream = next(s for s in engine._ledger.streams.values() if s.request.reply is victim)

    def broken(*_: object) -> str:
        raise ValueError("no such character")

    monkeypatch.setattr(stream.writer, "push", broken)
    finish(engine)
    assert "no such character" in str(victim.error)
    equal(other, expected)


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


def test_an_engine_says_what_it_reserved(engine: Engine) -> None:
    text = str(engine)
    for part in ("32 slots of 128 tokens", "256 pages", "MB of KV cache", "decode of 1, 32"):
        assert part in text
    assert engine.runner.cache_bytes == sum(
        pages.nbytes for pages in jax.tree.leaves(engine.runner._cache)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, "slots is 0"),
        ({"context": 0}, "context of 0 tokens"),
        ({"context": 9999}, "takes from 1 to 512"),
        ({"step_tokens": 8, "slots": 8}, "step_tokens is 8, but 8 slots"),
        ({"slots": 5, "shapes": FOUR}, r"shapes.decode is \(4,\), but 5 slots"),
        ({"slots": 2, "shapes": Shapes((1, 2), (8, 4), (2,), 4)}, r"shapes.rows is \(8, 4\)"),
        ({"pages": 7, "context": 128}, "takes 8 pages of 16 tokens .* the cache has 7"),
        ({"kv_bytes": 100}, "the cache has 0"),
        ({"pages": 8, "kv_bytes": 1}, "give one of them"),
        ({"slots": 9, "pages": 8, "context": 128}, "9 slots would share 8 pages"),
        ({"pages": 1 << 40, "context": 128}, "out of memory: a KV cache of"),
        ({"decode_steps": 0}, "decode_steps is 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    model: Model, options: dict[str, int], message: str
) -> None:
    """KV-09, PAR-09."""
    with pytest.raises(StokerError, match=message):
        Engine(model, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"slots": 3, "step_tokens": 31, "context": 100},
        {"slots": 1, "step_tokens": 2, "context": 100},
        {"slots": 4, "step_tokens": 6, "context": 50, "pages": 4},
    ],
)
def test_odd_options_that_fit_work(alone: Engine, model: Model, options: dict[str, int]) -> None:
    engine = Engine(model, **options)
    replies = engine.generate([PROMPT[:40]] * 4, dataclasses.replace(SEEDED, max_tokens=8))
    (expected,) = alone.generate([PROMPT[:40]], dataclasses.replace(SEEDED, max_tokens=8))
    for reply in replies:
        equal(reply, expected)


@pytest.fixture(scope="module")
def small() -> Iterator[Engine]:
    yield Engine(exact(), slots=4, context=64, step_tokens=16)


BAD = {
    "empty": ([], {}, "prompt is empty"),
    "too long": (list(range(64)), {}, "64 tokens, but the context holds 64"),
    "far too long": ([1] * 100_000, {}, "100000 tokens, but the context holds 64"),
    "outside": ([5, 512], {}, "token id 512 is not in the vocabulary of 512"),
    "negative": ([-1], {}, "token id -1"),
    "fraction": ([1.5], {}, "holds 1.5"),
    "true": ([True], {}, "holds True"),
    "text": ("hello", {}, "no tokenizer"),
    "bias": ([1], {"logit_bias": {99999: 5}}, "99999"),
    "stop id": ([1], {"stop_ids": (512,)}, "stop_ids names token id 512"),
    "allowed": ([1], {"allowed_ids": (700,)}, "allowed_ids names token id 700"),
    "stop": ([1], {"stop": ("x",)}, "stop strings need a tokenizer"),
    "all banned": ([1], {"allowed_ids": (3,), "logit_bias": {3: -100}}, "no token"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_requests_are_refused_and_the_batch_completes(small: Engine, kind: str) -> None:
    prompt, options, message = BAD[kind]
    params = SamplingParams(max_tokens=4, **options)
    steps = small.stats.steps
    with pytest.raises(StokerError, match=message):
        small.add(prompt, params)
    assert (small.stats.steps, small.unfinished) == (steps, 0)
    good = SamplingParams(max_tokens=4)
    (expected,) = small.generate([PROMPT[:9]], good)
    replies = small.generate([PROMPT[:9], prompt, PROMPT[:9]], [good, params, good])
    assert replies[1].finish_reason == "error" and message.split()[0] in str(replies[1].error)
    equal(replies[0], expected)
    equal(replies[2], expected)


def test_names_are_not_used_twice(small: Engine) -> None:
    small.add([1, 2], SamplingParams(max_tokens=3), request_id="mine")
    with pytest.raises(StokerError, match="'mine' is under way"):
        small.add([1, 2], request_id="mine")
    finish(small)
    small.add([1, 2], SamplingParams(max_tokens=3), request_id="mine")
    finish(small)


@pytest.mark.parametrize("options", [{"priority": 1.5}, {"priority": None}, {"salt": ["a"]}])
def test_what_would_break_the_books_is_refused(small: Engine, options: dict[str, object]) -> None:
    with pytest.raises(StokerError, match=r"priority is|salt is"):
        small.add([1, 2], **options)
    assert small.unfinished == 0


def test_lists_must_fit(small: Engine) -> None:
    with pytest.raises(StokerError, match="list of prompts"):
        small.generate("hello")
    with pytest.raises(StokerError, match="2 prompts came with 1"):
        small.generate([[1], [2]], [GREEDY])
    assert small.generate([]) == []


def test_a_stream_that_is_left_ends_its_request(small: Engine) -> None:
    (expected,) = small.generate([PROMPT[:9]], SamplingParams(max_tokens=20))
    stream = small.stream(PROMPT[:9], SamplingParams(max_tokens=20))
    taken: list[int] = []
    for delta in stream:
        taken += delta.ids
        if len(taken) == 5:
            break
    stream.close()
    assert small.unfinished == 0
    assert taken == expected.ids[:5]
    with pytest.raises(StokerError, match="prompt is empty"):
        next(small.stream([]))


def test_times_and_counters_add_up(small: Engine) -> None:
    small.reset_prefix_cache()
    before = dataclasses.replace(small.stats, finished=dict(small.stats.finished))
    replies = small.generate([PROMPT[:20]] * 6, SamplingParams(max_tokens=7))
    stats = small.stats
    assert stats.generated_tokens - before.generated_tokens == 6 * 7
    assert stats.prompt_tokens - before.prompt_tokens == 6 * 20
    assert stats.cached_tokens - before.cached_tokens == sum(r.cached_tokens for r in replies)
    assert stats.finished["length"] - before.finished["length"] == 6
    for reply in replies:
        times = reply.times
        assert times.arrived <= times.started <= times.first_token <= times.finished
        assert 0 <= times.queue_s <= times.ttft_s
    # Four slots: two of the six waited for a place.
    waits = sorted(reply.times.started for reply in replies)
    assert waits[4] > max(waits[:4])
    assert 0 < stats.host_share <= 1
    assert 0 <= stats.padding_share < 1


def test_the_context_bounds_the_reply(small: Engine) -> None:
    replies = small.generate([PROMPT[:n] for n in (40, 45)], SamplingParams())
    assert [len(reply.ids) for reply in replies] == [24, 19]
    (last,) = small.generate([list(range(63))], SamplingParams(max_tokens=100))
    assert (len(last.ids), last.finish_reason) == (1, "length")
