"""What an engine has done so far, in numbers that are cheap to keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from .sequences import Plan, Rows


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
      surplus_tokens: planned, and discarded or never sampled because the reply had ended; what they
        would have read and run is counted all the same.
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
        padded: tuple[int, int],
        weight_bytes: Callable[[float], float],
        kv_bytes: Callable[[Sequence[Rows]], float],
    ) -> None:
        """Counts a step, and what each part of a mesh's data axis runs in it.

        Parts read weights of their own at the same time: that of the most rows is what counts.

        Args:
          plans: of each part.
          padded: rows that each part ran, padding included, and those of a score step.
          weight_bytes: of weights that a step of so many rows reads.
          kv_bytes: of keys and values that rows read and write.
        """
        some = [plan for plan in plans if plan is not None]
        repeat = max(plan.repeat for plan in some)
        ran = [plan for plan in some if plan.rows]
        scores = [plan.score for plan in some if plan.score is not None]
        self.steps += repeat
        self.decode_steps += repeat if ran and all(plan.decodes for plan in some) else 0
        n_rows = sum(plan.n_tokens for plan in ran) * repeat + sum(rows.count for rows in scores)
        shapes = padded[0] * repeat * bool(ran) + padded[1] * bool(scores)
        self.rows += n_rows
        self.padded_rows += shapes * len(plans) - n_rows
        self.sequences += sum(len(plan.rows) for plan in ran) * repeat
        self.kv_bytes += sum(kv_bytes(plan.rows) for plan in ran) * repeat
        self.kv_bytes += sum(kv_bytes((rows,)) for rows in scores)
        if ran:
            self.weight_bytes += weight_bytes(max(plan.n_tokens for plan in ran)) * repeat
        if scores:
            self.weight_bytes += weight_bytes(max(rows.count for rows in scores))
