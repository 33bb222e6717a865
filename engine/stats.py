"""What an engine has done so far, in numbers that are cheap to keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .sequences import Plan


@dataclasses.dataclass
class EngineStats:
    """Counters of an engine; all only rise.

    Attributes:
      steps: dispatched.
      decode_steps: of them, those that ran newest tokens only, each of several at once counted.
      rows: tokens that steps ran, padding not counted.
      padded_rows: rows of padding beside them.
      sequences: that steps ran, summed over steps.
      prompt_tokens: run or found in the prefix cache, the latter counted in `cached_tokens` too.
      cached_tokens: prompt tokens whose computation the prefix cache saved.
      generated_tokens: that became part of replies.
      surplus_tokens: sampled, and discarded because the reply had ended.
      weight_bytes: of weights that steps had to read, by `step_cost`.
      kv_bytes: of keys and values that they had to read and write.
      preemptions: sequences that gave up their pages.
      finished: choices by how they ended.
      failures: steps that raised an error, after which everything running was computed again.
      busy_s: seconds spent in `step`.
      wait_s: of them, seconds that the host waited for the device.
    """

    steps: int = 0
    decode_steps: int = 0
    rows: int = 0
    padded_rows: int = 0
    sequences: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    surplus_tokens: int = 0
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    preemptions: int = 0
    finished: dict[str, int] = dataclasses.field(default_factory=dict)
    failures: int = 0
    busy_s: float = 0.0
    wait_s: float = 0.0

    @property
    def host_s(self) -> float:
        """Seconds of `step` that were Python's."""
        return self.busy_s - self.wait_s

    @property
    def host_share(self) -> float:
        """Share of the time in `step` that was Python's; the device may have been at work too."""
        return self.host_s / self.busy_s if self.busy_s else 0.0

    @property
    def occupancy(self) -> float:
        """Sequences of the average step."""
        return self.sequences / self.steps if self.steps else 0.0

    @property
    def padding_share(self) -> float:
        """Rows that were padding, of all that ran."""
        total = self.rows + self.padded_rows
        return self.padded_rows / total if total else 0.0

    def count(
        self,
        plans: Sequence[Plan | None],
        padded: int,
        score_rows: int,
        step_bytes: tuple[float, float],
    ) -> None:
        """Counts a step, and what each part of a mesh's data axis runs in it.

        Parts read their weights at the same time, each its own: one reading is what a step takes.

        Args:
          plans: of each part.
          padded: rows that each part ran, padding included.
          score_rows: rows of a score step, likewise.
          step_bytes: of the weights, and of one token's keys and values.
        """
        some = [plan for plan in plans if plan is not None]
        weights, token = step_bytes
        repeat = max(plan.repeat for plan in some)
        ran, scored = any(plan.rows for plan in some), any(plan.score for plan in some)
        self.steps += repeat
        self.decode_steps += repeat if ran and all(plan.decodes for plan in some) else 0
        self.weight_bytes += weights * (repeat * ran + scored)
        n_rows, touched = 0, 0
        for plan in some:
            n_rows += plan.n_tokens * repeat
            self.sequences += len(plan.rows) * repeat
            live = sum(rows.start + rows.count for rows in plan.rows)
            touched += (live + plan.n_tokens) * repeat if plan.rows else 0
            if plan.score is not None:
                n_rows += plan.score.count
                touched += plan.score.start + 2 * plan.score.count
        self.rows += n_rows
        self.padded_rows += (padded * repeat * ran + score_rows * scored) * len(plans) - n_rows
        self.kv_bytes += token * touched
