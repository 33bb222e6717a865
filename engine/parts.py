"""Schedulers of the parts of a mesh's `data` axis, which share every step: plain Python, no JAX.

A sequence belongs to one part as long as it lives: its slot, its pages and what others may share of
them are there.
"""

from __future__ import annotations

from collections.abc import Iterable

from .scheduler import Scheduler
from .sequences import Plan, Sequence


class Parts:
    """Gives each sequence to a part, and plans the parts' steps together.

    Args:
      schedulers: one for each part.

    Attributes:
      schedulers: likewise.
    """

    def __init__(self, schedulers: Iterable[Scheduler]) -> None:
        self.schedulers = tuple(schedulers)

    @property
    def running(self) -> list[Sequence]:
        """Sequences that have a slot."""
        return [sequence for part in self.schedulers for sequence in part.running]

    @property
    def waiting(self) -> list[Sequence]:
        """Sequences that wait for a slot or for pages."""
        return [sequence for part in self.schedulers for sequence in part.waiting]

    @property
    def preemptions(self) -> int:
        """How often a sequence lost its pages."""
        return sum(part.preemptions for part in self.schedulers)

    def add(self, sequence: Sequence) -> None:
        """Puts a sequence into the queue of the part that serves it best.

        That is one with a free slot, where most of its pages are known, which has least to do.
        """

        def cost(part: int) -> tuple[bool, int, int, int]:
            scheduler = self.schedulers[part]
            waits = len(scheduler.waiting) >= scheduler.free_slots
            return waits, -scheduler.count_known(sequence), scheduler.load, part

        sequence.part = min(range(len(self.schedulers)), key=cost)
        self._of(sequence).add(sequence)

    def finish(self, sequence: Sequence) -> None:
        """As `Scheduler.finish`."""
        self._of(sequence).finish(sequence)

    def accept(self, sequence: Sequence, token: int) -> None:
        """As `Scheduler.accept`."""
        self._of(sequence).accept(sequence, token)

    def forget(self, sequence: Sequence) -> None:
        """As `Scheduler.forget`."""
        self._of(sequence).forget(sequence)

    def restart(self) -> None:
        """As `Scheduler.restart`, of all parts."""
        for part in self.schedulers:
            part.restart()

    def plan(self) -> tuple[Plan | None, ...] | None:
        """Each part's share of the next step, or None if no part has anything to run.

        Parts take several decode steps at once only where all can: they run the same program.
        """
        steady = all(part.steady for part in self.schedulers)
        plans = tuple(part.plan(steady=steady) for part in self.schedulers)
        return plans if any(plans) else None

    def _of(self, sequence: Sequence) -> Scheduler:
        return self.schedulers[sequence.part]
