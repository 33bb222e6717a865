"""Options and requests that cannot be are refused; limits, times and counters."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import jax
import pytest
from engines import FOUR, GREEDY, PROMPT, SEEDED, equal, exact, finish

from stoker.engine.engine import Engine
from stoker.engine.sampling_params import SamplingParams
from stoker.engine.shapes import Shapes
from stoker.models.errors import StokerError
from stoker.models.loading import Model
from stoker.models.parameters import count_bytes


def test_an_engine_says_what_it_reserved(engine: Engine) -> None:
    text = str(engine)
    for part in ("32 slots of 128 tokens", "256 pages", "MB of KV cache", "decode of 1, 32"):
        assert part in text
    assert engine.runner.cache_bytes == sum(
        pages.nbytes for pages in jax.tree.leaves(engine.runner.device.cache)
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


def test_what_is_no_prompt_at_all_fails_alone(small: Engine) -> None:
    good = SamplingParams(max_tokens=2)
    replies = small.generate([[1, 2], 5, [3]], [good, good, "greedy"])
    assert replies[0].finish_reason == "length"
    assert "the prompt is 5" in str(replies[1].error)
    assert "params is 'greedy'" in str(replies[2].error)
    with pytest.raises(StokerError, match="min_tokens is 60, but after 9 prompt tokens"):
        small.add(PROMPT[:9], SamplingParams(min_tokens=60))
    assert small.unfinished == 0


def test_scoring_one_token_ends_at_once(small: Engine) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=1, n=2)
    deltas = list(small.stream([5], params))
    assert [(d.choice.index, d.finished) for d in deltas] == [(0, True), (1, True)]
    assert small.unfinished == 0


def test_streams_of_one_thread_get_all_of_their_deltas(small: Engine) -> None:
    params = SamplingParams(max_tokens=10)
    expected = [reply.ids for reply in small.generate([PROMPT[:9], PROMPT[:12]], params)]
    streams = [small.stream(prompt, params) for prompt in (PROMPT[:9], PROMPT[:12])]
    got: list[list[int]] = [[], []]
    for first, second in itertools.zip_longest(*streams):
        for ids, delta in zip(got, (first, second), strict=True):
            ids.extend(delta.ids if delta else ())
    assert got == expected


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
    assert stats.finished["length"] - before.finished.get("length", 0) == 6
    for reply in replies:
        times = reply.times
        assert times.arrived <= times.started <= times.first_token <= times.finished
        assert 0 <= times.queue_s <= times.ttft_s
    # Four slots: two of the six waited for a place.
    waits = sorted(reply.times.started for reply in replies)
    assert waits[4] > max(waits[:4])
    assert 0 < stats.host_share <= 1
    # Each step reads every weight, but of the table only rows that are looked up.
    steps = stats.steps - before.steps
    weights = (stats.weight_bytes - before.weight_bytes) / steps
    table = small.model.params["embedding"].nbytes
    assert weights == pytest.approx(count_bytes(small.model.params) - table, rel=0.01)
    kv = (stats.kv_bytes - before.kv_bytes) / small.runner.token_bytes
    # At least: every token written once, and read once by each token of its reply that follows.
    computed = sum(20 - r.cached_tokens + 6 for r in replies)
    assert kv >= computed + sum(sum(range(21, 27)) for _ in replies)
    assert 0 <= stats.padding_share < 1


def test_the_context_bounds_the_reply(small: Engine) -> None:
    replies = small.generate([PROMPT[:n] for n in (40, 45)], SamplingParams())
    assert [len(reply.ids) for reply in replies] == [24, 19]
    (last,) = small.generate([list(range(63))], SamplingParams(max_tokens=100))
    assert (len(last.ids), last.finish_reason) == (1, "length")
