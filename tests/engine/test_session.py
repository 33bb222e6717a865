"""The single-user loop: reuse of the cache, limits, and errors before any work."""

from __future__ import annotations

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TINY, random_params

from stoker.engine.sampling_params import SamplingParams
from stoker.engine.session import Session
from stoker.models.errors import StokerError

PARAMS = random_params(TINY)
RNG = np.random.default_rng(5)
PROMPT = RNG.integers(0, 512, 30).tolist()


@pytest.fixture(scope="module")
def shared() -> Session:
    return Session(PARAMS, TINY, context=128, chunks=(16,))


def reply(session: Session, prompt: list[int], **options: object) -> list[int]:
    return [token.id for token in session.generate(prompt, SamplingParams(**options))]


def test_a_conversation_reuses_its_cache(shared: Session) -> None:
    shared.reset()
    first = reply(shared, PROMPT, max_tokens=10)
    assert shared.reused == 0
    longer = PROMPT + first + [3, 4, 5]
    fresh = Session(PARAMS, TINY, context=128, chunks=(16,))
    assert reply(shared, longer, max_tokens=10) == reply(fresh, longer, max_tokens=10)
    # All but the first reply's last token, which was never run, and the new ones.
    assert shared.reused == len(PROMPT) + 9
    edited = [*longer[:12], 99, *longer[13:]]
    fresh.reset()
    assert reply(shared, edited, max_tokens=10) == reply(fresh, edited, max_tokens=10)
    assert shared.reused == 12


def test_an_identical_prompt_recomputes_its_last_token(shared: Session) -> None:
    shared.reset()
    expected = reply(shared, PROMPT, max_tokens=5)
    assert reply(shared, PROMPT, max_tokens=5) == expected
    assert shared.reused == len(PROMPT) - 1


def test_a_reply_left_early_leaves_the_cache_valid(shared: Session) -> None:
    shared.reset()
    expected = reply(shared, PROMPT, max_tokens=20)
    shared.reset()
    stream = shared.generate(PROMPT, SamplingParams(max_tokens=20))
    taken = [token.id for token in itertools.islice(stream, 7)]
    stream.close()
    assert reply(shared, PROMPT + taken, max_tokens=13) == expected[7:]
    assert shared.reused >= len(PROMPT) + 6


def test_stop_ids_end_the_reply_unless_ignored(shared: Session) -> None:
    ids = reply(shared, PROMPT, max_tokens=20)
    end = {ids[5], 511}
    at = ids.index(ids[5])
    stopped = shared.generate(PROMPT, SamplingParams(max_tokens=20), end)
    assert [token.id for token in stopped] == ids[: at + 1]
    ignored = shared.generate(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True), end)
    assert [token.id for token in ignored] == ids


def test_the_context_bounds_the_reply(shared: Session) -> None:
    prompt = RNG.integers(0, 512, 120).tolist()
    assert len(reply(shared, prompt)) == 8
    assert len(reply(shared, prompt, max_tokens=100)) == 8
    assert len(reply(shared, [*prompt, *prompt[:7]])) == 1


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        (list(range(128)), "128 tokens and fills the context of 128"),
        (list(range(129)), "129 tokens, but the context holds 128"),
        ([5, 512], "token id 512 is not in the vocabulary of 512"),
        ([-1], "token id -1 is not"),
    ],
)
def test_bad_prompts_are_refused_before_any_step(
    shared: Session, prompt: list[int], message: str
) -> None:
    programs = len(shared.programs.compilations)
    with pytest.raises(StokerError, match=message):
        reply(shared, prompt)
    assert len(shared.programs.compilations) == programs


@pytest.mark.parametrize("context", [0, -3, 513])
def test_bad_contexts_are_refused(context: int) -> None:
    with pytest.raises(StokerError, match=f"{context} tokens was asked for.* 1 to 512"):
        Session(PARAMS, TINY, context=context)


def test_damaged_weights_are_an_error_and_the_session_survives() -> None:
    damaged = dict(PARAMS) | {"embedding": PARAMS["embedding"].at[13].set(jnp.nan)}
    session = Session(damaged, TINY, context=64, chunks=(16,))
    with pytest.raises(StokerError, match="logits are not finite after 2 tokens"):
        reply(session, [1, 13], max_tokens=3)
    fresh = Session(PARAMS, TINY, context=64, chunks=(16,))
    assert reply(session, [1, 14], max_tokens=3) == reply(fresh, [1, 14], max_tokens=3)


@pytest.mark.parametrize("calls", [1, 2, 3, 5])
def test_a_reply_survives_an_interruption(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after a step has taken the donated cache, and before its result has a name."""
    session = Session(PARAMS, TINY, context=64, chunks=(16,))
    expected = reply(session, PROMPT, max_tokens=6)
    run, count = session.programs._run, itertools.count(1)

    def interrupted(*args: object) -> object:
        result = run(*args)
        if next(count) == calls:
            raise KeyboardInterrupt
        return result

    session.reset()
    monkeypatch.setattr(session.programs, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reply(session, PROMPT, max_tokens=6)
    assert reply(session, PROMPT, max_tokens=6) == expected
    monkeypatch.undo()
    assert reply(session, PROMPT, max_tokens=6) == expected
    assert session.score([*PROMPT, *expected])[-1] is not None


@pytest.mark.parametrize("meanwhile", ["generate", "score", "reset"])
def test_replies_do_not_mix(shared: Session, meanwhile: str) -> None:
    shared.reset()
    expected = reply(shared, PROMPT, max_tokens=8)
    shared.reset()
    first = shared.generate(PROMPT, SamplingParams(max_tokens=8))
    taken = [next(first).id, next(first).id]
    other = [7, 8, 9, 10]
    if meanwhile == "generate":
        reply(shared, other, max_tokens=3)
    elif meanwhile == "score":
        shared.score(other)
    else:
        shared.reset()
    with pytest.raises(StokerError, match="another call has used this session"):
        next(first)
    assert reply(shared, PROMPT, max_tokens=8) == expected
    assert taken == expected[:2]


def test_bfloat16_is_close_to_float32() -> None:
    config = dataclasses.replace(TINY, dtype="bfloat16", kv_dtype="bfloat16")
    scores = Session(PARAMS, config, context=64).score(PROMPT)[1:]
    exact = Session(PARAMS, TINY, context=64).score(PROMPT)[1:]
    np.testing.assert_allclose(scores, exact, atol=0.3)
    assert np.abs(np.subtract(scores, exact)).max() > 0
