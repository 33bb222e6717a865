"""The shapes that steps are compiled for: small enough a set to enumerate, print and warm up."""

from __future__ import annotations

import dataclasses
import itertools

from ..models.errors import StokerError

#: Smallest number of rows of a step that runs prompts.
LEAST_ROWS = 16
#: Sequences that a prefill step holds at least, where there are more slots: its head runs for each.
LEAST_SEQUENCES = 4
#: Rows of a score step, each of which takes logits over the whole vocabulary.
SCORE_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Shapes:
    """What the steps of one engine are compiled for.

    Attributes:
      decode: sequences (B) of decode steps, rising.
      rows: flat rows (T) of prefill steps, rising; the last is the budget of a step.
      sequences: sequences (B) of prefill steps, rising.
      score: rows of score steps, of one sequence.
    """

    decode: tuple[int, ...]
    rows: tuple[int, ...]
    sequences: tuple[int, ...]
    score: int

    @property
    def step_tokens(self) -> int:
        """Most rows of a step."""
        return self.rows[-1]

    def check(self, slots: int) -> None:
        """Raises StokerError unless every step over `slots` sequences has a shape that holds it."""
        if slots < 1:
            raise StokerError(f"slots is {slots}; at least one sequence must run")
        for name in ("decode", "rows", "sequences"):
            sizes = getattr(self, name)
            if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
                raise StokerError(f"shapes.{name} is {sizes}; it must rise from at least 1")
        for name in ("decode", "sequences"):
            if getattr(self, name)[-1] < slots:
                raise StokerError(
                    f"shapes.{name} is {getattr(self, name)}, but {slots} slots may run in a step"
                )
        if self.step_tokens <= slots:
            raise StokerError(
                f"step_tokens is {self.step_tokens}, but {slots} slots may decode in a step: give "
                f"more than {slots}, so that prompts go on beside them"
            )
        if self.score < 1:
            raise StokerError(f"shapes.score is {self.score}; it must be at least 1")

    def prefill(self) -> list[tuple[int, int]]:
        """Every (T, B) of prefill steps."""
        return list(itertools.product(self.rows, self.sequences))

    def fit_decode(self, n_sequences: int) -> int:
        """B of the smallest decode step that holds so many sequences."""
        return _fit(self.decode, n_sequences)

    def fit_prefill(self, n_rows: int, n_sequences: int) -> tuple[int, int]:
        """(T, B) of the smallest prefill step that holds so many rows and sequences."""
        return _fit(self.rows, n_rows), _fit(self.sequences, n_sequences)

    def __str__(self) -> str:
        decode, rows, sequences = (
            ", ".join(map(str, sizes)) for sizes in (self.decode, self.rows, self.sequences)
        )
        return (
            f"decode of {decode} sequences; prefill of {rows} rows for {sequences} sequences; "
            f"score of {self.score} rows"
        )


def choose_shapes(slots: int, step_tokens: int) -> Shapes:
    """Shapes for `slots` sequences at once and steps of at most `step_tokens` rows.

    Above a few, decode sizes rise by a quarter or less, in steps of 4, which kernels take at once;
    sizes of prefill, of which there are more kinds, by a half or a third. So little of a step is
    padding, and the number of programs grows with the logarithm only. `Shapes.check` tells whether
    they fit each other.
    """
    slots, step_tokens = max(slots, 1), max(step_tokens, 1)
    least = min(LEAST_SEQUENCES, slots)
    score = min(SCORE_ROWS, step_tokens)
    return Shapes(
        decode=_sizes(1, slots, parts=4),
        rows=_sizes(min(LEAST_ROWS, step_tokens), step_tokens, parts=2),
        sequences=tuple(sorted({least, slots})),
        score=score,
    )


def _sizes(least: int, most: int, parts: int) -> tuple[int, ...]:
    """Powers of two from `least` on, `parts` sizes to each where they are 4 apart; and `most`."""
    sizes = {most}
    for power in (2**exponent for exponent in range(most.bit_length())):
        apart = max(power // parts, 4)
        sizes |= {power, *range(power + apart, 2 * power, apart)}
    return tuple(sorted(size for size in sizes if least <= size <= most))


def _fit(sizes: tuple[int, ...], wanted: int) -> int:
    return next(size for size in sizes if size >= wanted)
