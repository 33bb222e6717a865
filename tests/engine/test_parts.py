"""Schedulers of several parts: who gets a sequence, and what they plan together. No JAX."""

from __future__ import annotations

from stoker.engine.pages import Pages
from stoker.engine.parts import Parts
from stoker.engine.scheduler import Scheduler
from stoker.engine.sequences import NO_SLOT, Sequence

Z = 4


def parts(count: int = 2, slots: int = 2, repeat: int = 1) -> Parts:
    return Parts(
        Scheduler(Pages(32, Z), slots=slots, step_tokens=16, score_tokens=8, repeat=repeat)
        for _ in range(count)
    )


def sequence(number: int, tokens: list[int], reply: int = 8) -> Sequence:
    return Sequence(number, list(tokens), len(tokens), len(tokens) + reply)


def run(group: Parts, token: int = 7) -> list[tuple[int, ...]]:
    """Steps until nothing is left; of each, the parts that took part."""
    steps = []
    while (plans := group.plan()) is not None:
        steps.append(tuple(part for part, plan in enumerate(plans) if plan))
        for plan in filter(None, plans):
            for rows in plan.rows:
                for _ in range(rows.samples):
                    group.accept(rows.sequence, token)
                if rows.sequence.length == rows.sequence.max_len:
                    group.finish(rows.sequence)
    return steps


def test_sequences_go_where_there_is_least_to_do() -> None:
    group = parts()
    long, short, third = (sequence(i, [i] * n) for i, n in enumerate((30, 5, 5)))
    for new in (long, short, third):
        group.add(new)
    assert [long.part, short.part, third.part] == [0, 1, 1]
    steps = run(group)
    assert (0, 1) in steps, "parts run in the same step"
    assert all(done.done and done.slot == NO_SLOT for done in (long, short, third))
    assert group.running == group.waiting == []
    assert [part.pages.used for part in group.schedulers] == [0, 0]


def test_a_prompt_goes_where_its_beginning_is_known() -> None:
    group = parts(3)
    first = sequence(0, [*range(13)])
    group.add(first)
    run(group)
    for number in (1, 2):
        group.add(sequence(number, [90 + number] * 5))
    again = sequence(3, [*range(13), 50, 51])
    group.add(again)
    assert again.part == first.part == 0
    run(group)
    assert again.cached == 3 * Z


def test_a_part_without_slots_is_left_alone() -> None:
    group = parts(slots=1)
    first, second = sequence(0, [*range(13)]), sequence(1, [*range(13)])
    group.add(first)
    group.plan()
    group.add(second)
    assert second.part == 1, "its beginning is known to the other part, which has no slot"


def test_several_steps_at_once_only_where_all_parts_can() -> None:
    group = parts(repeat=4)
    group.add(sequence(0, [1] * 3))
    (plan, _), (again, _) = group.plan(), group.plan()
    assert plan.repeat == 1 and again.repeat == 4
    group.add(sequence(1, [2] * 20))
    while any(s.left > 1 for s in group.running) or group.waiting:
        plans = group.plan()
        assert [plan.repeat for plan in plans if plan] == [1] * len(list(filter(None, plans)))
    assert {plan.repeat for plan in group.plan() if plan} == {4}


def test_restarting_gives_every_sequence_back() -> None:
    group = parts()
    for number in range(4):
        group.add(sequence(number, [number] * 6))
    group.plan()
    assert len(group.running) == 4
    group.restart()
    assert len(group.waiting) == 4 and not group.running
    run(group)
    assert [part.pages.used for part in group.schedulers] == [0, 0]
