"""Replays of requests that arrive over time."""

from __future__ import annotations

import json

import numpy as np
import pytest
from engines import CONTEXT, FOUR, exact

from stoker.engine.engine import Engine
from stoker.engine.trace import Arrival, parse_trace, poisson_trace, replay
from stoker.models.errors import StokerError


def test_arrivals_are_random_at_the_rate_asked_for() -> None:
    trace = poisson_trace(50.0, 2000, 40, 20, shared_len=8, seed=1)
    gaps = np.diff([arrival.at for arrival in trace])
    assert trace[0].at == 0
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.1)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.1)  # as of an exponential distribution
    assert {arrival.shared_len for arrival in trace} == {8}
    assert np.mean([arrival.prompt_len - 8 for arrival in trace]) == pytest.approx(40, rel=0.05)
    assert poisson_trace(50.0, 20, 40, 20, seed=1) == poisson_trace(50.0, 20, 40, 20, seed=1)
    assert {arrival.at for arrival in poisson_trace(float("inf"), 5, 4, 2)} == {0.0}


def test_a_trace_is_read_in_order_of_time() -> None:
    entries = [
        {"at": 2, "prompt_len": 3, "gen_len": 1},
        {"at": 0.5, "prompt_len": 9, "gen_len": 2, "shared_len": 4, "group": 1},
    ]
    first, second = parse_trace(json.dumps(entries))
    assert first == Arrival(0.5, 9, 2, 4, 1)
    assert second == Arrival(2, 3, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "at least one request"),
        ('{"at": 0}', "JSON list"),
        ("[3]", "request 0 of the trace is wrong"),
        ('[{"at": 0, "prompt_len": 1}]', "request 0 .*gen_len"),
        ('[{"at": -1, "prompt_len": 1, "gen_len": 1}]', "arrives at -1 s"),
        ('[{"at": "0", "prompt_len": 1, "gen_len": 1}]', "number of seconds, not '0'"),
        ('[{"at": NaN, "prompt_len": 1, "gen_len": 1}]', "arrives at nan s"),
        ('[{"at": 0, "prompt_len": 0, "gen_len": 1}]', "cannot be"),
        ('[{"at": 0, "prompt_len": 1.5, "gen_len": 1}]', "whole numbers"),
        ('[{"at": 0, "prompt_len": 2, "gen_len": 1, "shared_len": 3}]', "3 of them shared"),
        ('[{"at": 0, "prompt_len": 2, "gen_len": 1, "foo": 3}]', "foo"),
    ],
)
def test_bad_traces_are_refused_by_entry(text: str, message: str) -> None:
    with pytest.raises(StokerError, match=message):
        parse_trace(text)


def test_a_replay_runs_every_request_and_times_it() -> None:
    engine = Engine(exact(), slots=4, context=CONTEXT, shapes=FOUR)
    trace = [
        Arrival(0.0, 40, 5, shared_len=33, group=0),
        Arrival(0.0, 7, 1),
        *(Arrival(0.05, 45, 9, shared_len=33, group=0) for _ in range(6)),
    ]
    told: list[tuple[int, int]] = []
    result = replay(engine, trace, advance=lambda done, total: told.append((done, total)))
    assert [reply.generated_tokens for reply in result.replies] == [5, 1] + [9] * 6
    assert [len(reply.prompt_ids) for reply in result.replies] == [40, 7] + [45] * 6
    beginnings = {tuple(r.prompt_ids[:33]) for r in result.replies if len(r.prompt_ids) > 7}
    assert len(beginnings) == 1
    assert sum(reply.cached_tokens for reply in result.replies) == 6 * 32
    assert result.seconds >= 0.05
    assert (result.ttft_s() >= result.queue_s()).all()
    assert (result.tpot_s() > 0).all() and len(result.tpot_s()) == 7
    assert 1 <= result.occupancy <= 4
    assert told[-1] == (8, 8)


def test_a_request_that_never_fits_is_refused_before_anything_runs() -> None:
    engine = Engine(exact(), slots=4, context=CONTEXT, shapes=FOUR)
    with pytest.raises(StokerError, match="the context holds 128"):
        replay(engine, [Arrival(0.0, 3, 2), Arrival(0.0, 500, 1)])
    assert engine.stats.steps == 0
