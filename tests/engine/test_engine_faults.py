"""Steps and host code that fail: no request is lost, and one failure is one request's."""

from __future__ import annotations

import itertools

import pytest
from engines import CONTEXT, FOUR, GREEDY, PROMPT, SEEDED, equal, finish

from stoker.engine.engine import Engine
from stoker.models.loading import Model


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


def test_a_step_that_fails_after_good_ones_is_not_tried_for_ever(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of several chunks are read well, and every decode step fails."""
    engine = Engine(model, slots=2, context=CONTEXT, step_tokens=16)

    def broken(*_: object) -> object:
        raise RuntimeError("does not compile")

    with monkeypatch.context() as patched:
        patched.setattr(engine.runner.programs, "decode", broken)
        (reply,) = engine.generate([PROMPT], GREEDY)
    assert "failed twice: does not compile" in str(reply.error)
    assert engine.stats.failures == 2
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
