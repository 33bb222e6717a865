"""The scheduler and its pages by random traces, with a pretend device: no JAX."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.engine.pages import Pages
from stoker.engine.scheduler import Scheduler
from stoker.engine.sequences import NO_SLOT, Plan, Sequence

Z = 4


class Device:
    """Runs plans on a cache of tokens instead of keys: a page cell holds its whole prefix.

    It sees what a real one would: reads of cells that hold another prefix are caught.
    """

    def __init__(self) -> None:
        self.cells: dict[tuple[int, int], tuple[int, ...]] = {}
        self.unread: dict[Sequence, list[int]] = {}
        self.lengths: dict[Sequence, int] = {}

    @staticmethod
    def successor(prefix: tuple[int, ...]) -> int:
        return hash((prefix, 7)) % 97

    def run(self, plan: Plan) -> dict[Sequence, list[int]]:
        sampled = {}
        for sequence in plan.admitted:
            assert not self.unread.get(sequence), "a token on the device is missing in a new slot"
        jobs = list(plan.rows) + ([plan.score] if plan.score else [])
        tables = {rows.sequence: list(rows.sequence.pages) for rows in jobs}
        if plan.rows and plan.decodes:
            # Decode steps go by the lengths that the device has kept.
            for rows in plan.rows:
                at = rows.start if rows.sequence in plan.admitted else self.lengths[rows.sequence]
                assert rows.start == at
        for rows in jobs:
            self.lengths[rows.sequence] = rows.start + max(rows.count, rows.samples)
            tokens = list(rows.sequence.tokens) + self.unread.get(rows.sequence, [])
            end = rows.start + (max(rows.samples, 1) if rows.count == 1 else rows.count)
            new = []
            for at in range(rows.start, end):
                prefix = tuple(tokens[: at + 1])
                assert len(prefix) == at + 1, "a token that nobody knows was run"
                table = tables[rows.sequence]
                for past in range(at):
                    cell = self.cells.get((table[past // Z], past % Z))
                    assert cell == prefix[: past + 1], "a key of another prefix was read"
                self.cells[table[at // Z], at % Z] = prefix
                if at >= rows.start + rows.count - 1 and len(new) < rows.samples:
                    new.append(self.successor(prefix))
                    tokens.append(new[-1])
            assert len(new) == rows.samples
            sampled[rows.sequence] = new
        return sampled


class Loop:
    """The engine's loop around a scheduler: a step is planned before the last one is read."""

    def __init__(self, pages: Pages, **options: Any) -> None:
        self.pages = pages
        self.scheduler = Scheduler(pages, **options)
        self.device = Device()
        self.inflight: dict[Sequence, list[int]] = {}
        self.finished: list[Sequence] = []

    def step(self) -> Plan | None:
        plan = self.scheduler.plan()
        self.device.unread = self.inflight
        sampled = self.device.run(plan) if plan else {}
        for sequence, tokens in self.inflight.items():
            for token in tokens:
                if sequence.done:
                    break
                self.scheduler.accept(sequence, token)
                if len(sequence.tokens) == sequence.max_len or token == self.stop:
                    self.scheduler.finish(sequence)
                    self.finished.append(sequence)
        self.inflight = sampled
        self.check()
        return plan

    stop = -1

    def check(self) -> None:
        live = [s for s in self.scheduler.running if not s.done]
        self.pages.check([s.pages for s in live])
        assert all(not s.pages and s.slot == NO_SLOT for s in self.scheduler.waiting)
        slots = [s.slot for s in live]
        assert len(set(slots)) == len(slots)

    def drain(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not (self.scheduler.running or self.scheduler.waiting or self.inflight):
                return
            self.step()
        raise AssertionError("the loop does not end")


def expected(prompt: list[int], max_len: int, stop: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < max_len:
        tokens.append(Device.successor(tuple(tokens)))
        if tokens[-1] == stop:
            break
    return tokens


@dataclasses.dataclass
class Case:
    pages: int
    slots: int
    step_tokens: int
    repeat: int
    mixed: bool
    share: bool
    seed: int


cases = st.builds(
    Case,
    pages=st.integers(10, 40),
    slots=st.integers(1, 6),
    step_tokens=st.integers(7, 24),
    repeat=st.sampled_from([1, 1, 3]),
    mixed=st.booleans(),
    share=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)


@settings(max_examples=120, deadline=None)
@given(cases)
def test_every_sequence_gets_its_own_tokens_whatever_happens(case: Case) -> None:
    rng = np.random.default_rng(case.seed)
    pages = Pages(case.pages, Z, share=case.share)
    loop = Loop(
        pages,
        slots=case.slots,
        step_tokens=case.step_tokens,
        score_tokens=5,
        repeat=case.repeat,
        mixed=case.mixed,
    )
    loop.stop = int(rng.integers(0, 97))
    prefixes = [rng.integers(0, 9, rng.integers(1, 20)).tolist() for _ in range(3)]
    wanted = {}
    everyone, aborted = [], set()
    for number in range(25):
        prompt = rng.integers(0, 9, rng.integers(1, 12)).tolist()
        if rng.random() < 0.7:
            prompt = prefixes[rng.integers(3)] + prompt[: rng.choice([0, 1, 12])]
        room = 4 * 10 - len(prompt)
        scored = bool(rng.random() < 0.2)
        sequence = Sequence(
            number,
            list(prompt),
            len(prompt),
            len(prompt) + int(rng.integers(1, min(room, 25) + 1)),
            priority=int(rng.integers(0, 3)),
            namespace=int(rng.integers(0, 2)),
            scored=scored,
        )
        wanted[number] = expected(prompt, sequence.max_len, loop.stop)
        loop.scheduler.add(sequence)
        everyone.append(sequence)
        for _ in range(rng.integers(0, 4)):
            loop.step()
        victim = everyone[rng.integers(len(everyone))]
        if rng.random() < 0.1 and not victim.done:
            loop.scheduler.finish(victim)
            aborted.add(victim.number)
            loop.check()
    loop.drain()
    assert pages.used == 0
    assert pages.free + pages.cached == case.pages
    assert not pages.cached or case.share
    assert {s.number for s in loop.finished} == set(wanted) - aborted
    for sequence in loop.finished:
        assert sequence.tokens == wanted[sequence.number]
    pages.clear()
    assert pages.free == case.pages


def loop(pages: int = 64, **options: int) -> Loop:
    given = {"slots": 4, "step_tokens": 16, "score_tokens": 8} | options
    return Loop(Pages(pages, Z), **given)


numbers = itertools.count()


def sequence(prompt: list[int], new: int = 4, **options: object) -> Sequence:
    return Sequence(next(numbers), list(prompt), len(prompt), len(prompt) + new, **options)


def test_a_long_prompt_does_not_starve_a_stream() -> None:
    """KV-07: the stream gets a token in every step, and a short prompt its turn."""
    run = loop(pages=400, step_tokens=16)
    stream = sequence([1, 2, 3], new=200)
    run.scheduler.add(stream)
    run.step()
    long, short = sequence(list(range(1000)), new=2), sequence([5, 6], new=2)
    run.scheduler.add(long)
    for _ in range(5):
        run.step()
    run.scheduler.add(short)
    first = {}
    for step in range(100):
        plan = run.step()
        assert plan is not None and stream in [rows.sequence for rows in plan.rows]
        for rows in plan.rows:
            if rows.samples:
                first.setdefault(rows.sequence, step)
    assert first[long] < 100 and short in first


def test_steady_prompts_do_not_starve_a_stream() -> None:
    run = loop(slots=3)
    stream = sequence([1], new=30)
    run.scheduler.add(stream)
    for _ in range(33):
        run.scheduler.add(sequence(np.random.default_rng(1).integers(0, 99, 30).tolist(), new=1))
        run.step()
    assert stream.done


def test_a_shared_prompt_is_computed_once() -> None:
    """Eight at once wait for the first one's pages instead of computing them too."""
    prompt = np.random.default_rng(0).integers(0, 99, 41).tolist()
    run = loop(slots=8, step_tokens=16)
    many = [sequence([*prompt, i], new=3) for i in range(8)]
    for one in many:
        run.scheduler.add(one)
    computed = 0
    while not all(one.done for one in many):
        if plan := run.step():
            computed += sum(r.count for r in plan.rows if r.start < len(prompt))
    assert [one.cached for one in many] == [0] + [40] * 7
    assert computed == 42 + 7 * 2


def test_namespaces_do_not_share() -> None:
    prompt = list(range(20))
    run = loop()
    first, second, third = (sequence(prompt, namespace=name) for name in "aba")
    for one in (first, second, third):
        run.scheduler.add(one)
        run.drain()
    assert (first.cached, second.cached, third.cached) == (0, 0, 16)


def test_the_last_token_is_always_recomputed() -> None:
    run = loop()
    for length, cached in ((16, 12), (17, 16)):
        for _ in range(2):
            one = sequence(list(range(length)), new=1)
            run.scheduler.add(one)
            run.drain()
        assert one.cached == cached


def test_the_youngest_of_the_lowest_priority_is_preempted() -> None:
    run = loop(pages=12, slots=3)
    old, young, low = (
        sequence([i] * 8, new=20, priority=priority) for i, priority in enumerate((1, 1, 0))
    )
    for one in (low, old, young):
        run.scheduler.add(one)
    run.drain()
    assert (low.preemptions > 0, young.preemptions > 0) == (True, True)
    assert old.preemptions == 0
    assert old.tokens == expected([0] * 8, 28, -1)


def test_books_of_a_busy_pool_stay_small() -> None:
    """Pages that are shared and given back thousands of times leave nothing behind."""
    run = loop()
    for _ in range(300):
        run.scheduler.add(sequence(list(range(60)), new=1))
        run.drain()
    assert len(run.pages._idle) <= 2 * run.pages.total + 64
    assert run.pages.cached == 15
    run.scheduler.add(sequence([97] * 250, new=1))
    run.drain()
    assert run.pages.used == 0 and run.pages.evictions > 0


@pytest.mark.parametrize("preempted", [False, True])
def test_what_is_forgotten_is_not_matched_again(preempted: bool) -> None:
    run = loop()
    first = sequence(list(range(20)), new=8)
    run.scheduler.add(first)
    for _ in range(3):
        run.step()
    if preempted:
        run.scheduler._preempt(first)
    run.scheduler.forget(first)
    run.scheduler.finish(first)
    run.drain()
    again = sequence(list(range(20)), new=8)
    run.scheduler.add(again)
    run.drain()
    assert again.cached == 0
    assert run.pages.used == 0


@pytest.mark.parametrize("share", [True, False])
def test_the_longest_unused_page_is_evicted_and_no_page_before_those_after_it(share: bool) -> None:
    pages = Pages(6, Z, share=share)
    run = Loop(pages, slots=1, step_tokens=32, score_tokens=8)
    first, second, third = ([i] * 9 for i in range(3))
    for prompt in (first, second, first, third):
        run.scheduler.add(sequence(prompt, new=1))
        run.drain()
    again = [sequence(prompt, new=1) for prompt in (first, second)]
    for one in again:
        run.scheduler.add(one)
        run.drain()
    assert [one.cached for one in again] == ([8, 4] if share else [0, 0])
    assert (pages.evictions > 0) == share


def test_scheduling_needs_no_jax() -> None:
    code = "import sys, stoker.engine.scheduler; print('jax' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("False\n", "")
