"""Sequences and plans of steps, as the scheduler sees them: plain Python, no JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from .pages import Node

NO_SLOT = -1


@dataclasses.dataclass(eq=False)
class Sequence:
    """One reply under way, as the scheduler sees it.

    Attributes:
      number: rises with arrival.
      tokens: of the prompt and, as they become known, of the reply.
      prompt_len: how many of them are the prompt's.
      max_len: prompt and reply together end here at the latest.
      priority: a higher one goes first.
      namespace: only sequences of the same one share cached pages.
      scored: every prompt token's log-probability is wanted, so each is run by a score step.
      slot: its row of the device's state while it runs; else `NO_SLOT`.
      computed: tokens whose keys and values are in the cache, or will be once the steps that were
        planned have run, unless the reply ends before.
      pending: tokens that planned steps sample and that are not known here yet.
      pages: of its cache, in order.
      cached: prompt tokens whose computation the prefix cache saved, before any preemption.
      preemptions: how often it lost its pages.
      failures: of steps that ran it, since its latest token.
      done: it takes part in nothing any more.
      part: of the mesh's data axis, that has its slot and pages.
    """

    number: int
    tokens: list[int]
    prompt_len: int
    max_len: int
    priority: int = 0
    namespace: Hashable = None
    scored: bool = False
    slot: int = NO_SLOT
    computed: int = 0
    pending: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    cached: int = 0
    preemptions: int = 0
    failures: int = 0
    done: bool = False
    part: int = 0
    # The last of its leading pages that are in the prefix tree, and how many those are.
    node: Node | None = None
    n_shared: int = 0

    @property
    def rank(self) -> tuple[int, int]:
        """Sequences of lower rank go first."""
        return (-self.priority, self.number)

    @property
    def length(self) -> int:
        """Tokens there are, those included that are still on the device."""
        return len(self.tokens) + self.pending

    @property
    def left(self) -> int:
        """Tokens to run before the next one can be sampled; 0 where none is wanted."""
        return self.length - self.computed if self.length < self.max_len else 0

    @property
    def scoring(self) -> bool:
        """Prompt tokens are still to be run by score steps: all but the last."""
        return self.scored and self.computed < self.prompt_len - 1


@dataclasses.dataclass(frozen=True)
class Rows:
    """What one sequence runs in a step: `count` tokens from position `start`.

    `samples` tokens follow: none after a chunk that does not end the prompt, otherwise one, or
    several where the step repeats. `decode`: it runs the newest token, and the device knows where.
    """

    sequence: Sequence
    start: int
    count: int
    samples: int
    decode: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """One step.

    Attributes:
      step: its number.
      admitted: sequences that start in it, whose slots the device must be told of.
      rows: what each sequence runs, first come first.
      score: a chunk of prompt to score on its own.
      repeat: decode steps that the device takes at once.
    """

    step: int
    admitted: tuple[Sequence, ...]
    rows: tuple[Rows, ...]
    score: Rows | None
    repeat: int

    @property
    def n_tokens(self) -> int:
        """Rows of the flat step (T before padding)."""
        return sum(rows.count for rows in self.rows)

    @property
    def decodes(self) -> bool:
        """Each sequence runs its newest token, and nothing else is run."""
        return all(rows.decode for rows in self.rows)
