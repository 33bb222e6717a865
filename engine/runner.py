"""The device's side of an engine: cache, state and programs, and steps from plans to results."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..models.config import ModelConfig
from ..models.ops.layout import DUMP_PAGE
from ..models.parameters import Params
from . import steps
from .cache import Cache, new_cache, token_bytes
from .pages import pages_for
from .programs import Programs
from .sampling_params import MAX_TOP, SamplingParams
from .sampling_rows import pack_sampling
from .sequences import Plan, Rows
from .sequences import Sequence as Scheduled
from .shapes import Shapes
from .steps import NEWEST, DecodeBatch, Outputs, PrefillBatch, Scores, State

#: Told how many programs are compiled, of how many.
Advance = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class Dispatched:
    """A step that the device has been given; its arrays may not be there yet.

    Attributes:
      plan: the step.
      outputs: of its rows `[B]`, or `[steps, B]` where it repeats.
      scores: of its score chunk.
      shape: padded rows and sequences that it ran.
    """

    plan: Plan
    outputs: Outputs | None
    scores: Scores | None
    shape: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Sampled:
    """What a step found for one sequence: a token for each it sampled, as Python numbers."""

    rows: Rows
    finite: list[bool]
    tokens: list[int]
    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]


@dataclasses.dataclass(frozen=True)
class Scored:
    """Log-probabilities of the tokens after each row of a score chunk, with alternatives."""

    rows: Rows
    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]


class Runner:
    """Runs planned steps.

    Args:
      params: the model's parameters.
      config: its architecture.
      shapes: what steps are compiled for.
      slots: rows of the state (S).
      context: most tokens of a sequence.
      n_pages: usable pages of the cache.
      end_ids: the model's end tokens, which `min_tokens` holds back.

    Attributes:
      programs: the compiled steps.
      wait_s: seconds spent waiting for the device.
    """

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        shapes: Shapes,
        *,
        slots: int,
        context: int,
        n_pages: int,
        end_ids: Sequence[int],
    ) -> None:
        self.programs = Programs(config, MAX_TOP)
        self.wait_s = 0.0
        self._params = params
        self._config = config
        self._shapes = shapes
        self._slots = slots
        self._context = context
        self._n_pages = n_pages
        self._end_ids = end_ids
        self.reset()

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache."""
        return sum(pages.nbytes for pages in jax.tree.leaves(self._cache))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return token_bytes(self._config)

    def reset(self) -> None:
        """Starts with an empty cache and state, whatever became of the old ones."""
        self._cache: Cache = ()  # the old one goes first: there may not be memory for both
        self._cache = new_cache(self._config, self._n_pages)
        idle = [SamplingParams()] * self._slots
        self._state = steps.new_state(
            idle, self._config.vocab_size, self._context, end_ids=self._end_ids
        )
        # Row S is padding's.
        shape = (self._slots + 1, pages_for(self._context))
        self._table: Any = np.full(shape, DUMP_PAGE, np.int32)
        self._listed: list[list[int]] = [[] for _ in range(self._slots)]

    def warmup(
        self, repeat: int, prompt_len: int | None = None, advance: Advance | None = None
    ) -> None:
        """Compiles every shape, after which any further one is counted as late.

        With `prompt_len`, only those that one prompt of so many tokens takes on its own.
        """
        shapes = self._shapes
        row = self._state_row([0], 0, 0, SamplingParams(seed=0))
        self._state = self.programs.admit(self._state, np.int32(0), row)
        if prompt_len is not None:
            self._warm_decode(shapes.decode[0], repeat)
            most = shapes.step_tokens
            for n_rows in {min(prompt_len, most), prompt_len % most} - {0}:
                self._warm_prefill(*shapes.fit_prefill(n_rows, 1))
            return
        jobs: list[Callable[[], None]] = [
            functools.partial(self._warm_decode, size, repeat) for size in shapes.decode
        ]
        jobs += [functools.partial(self._warm_prefill, *shape) for shape in shapes.prefill()]
        jobs.append(self._warm_score)
        for done, job in enumerate(jobs):
            job()
            if advance is not None:
                advance(done + 1, len(jobs))
        self.programs.seal()

    def _warm_decode(self, size: int, repeat: int) -> None:
        batch = self._decode_batch((), size)
        self._prepare(steps.decode, batch)
        if repeat > 1:
            self._prepare(steps.decode_steps, batch, steps=repeat)

    def _warm_prefill(self, n_rows: int, size: int) -> None:
        self._prepare(steps.prefill, self._prefill_batch((), n_rows, size))

    def _warm_score(self) -> None:
        n_rows = self._shapes.score
        targets = _integers(n_rows, 0)
        self._prepare(steps.score, self._prefill_batch((), n_rows, 1), targets)

    def dispatch(self, plan: Plan, params_of: Callable[[Scheduled], SamplingParams]) -> Dispatched:
        """Gives the device a step, and does not wait for it."""
        first = {rows.sequence: rows.start for rows in plan.rows}
        if plan.score is not None:
            first[plan.score.sequence] = plan.score.start
        for sequence in plan.admitted:
            row = self._state_row(
                sequence.tokens,
                sequence.prompt_len,
                first.get(sequence, 0),
                params_of(sequence),
            )
            self._state = self.programs.admit(self._state, np.int32(sequence.slot), row)
        for sequence in first:
            self._list_pages(sequence)
        scores = None if plan.score is None else self._dispatch_score(plan.score)
        outputs, shape = self._dispatch_rows(plan) if plan.rows else (None, (0, 0))
        for array in jax.tree.leaves((outputs, scores)):
            array.copy_to_host_async()
        return Dispatched(plan, outputs, scores, shape)

    def read(self, dispatched: Dispatched) -> list[Sampled | Scored]:
        """Waits for a step, and returns what it found, in the order of its plan."""
        start = time.perf_counter()
        outputs, scores = jax.device_get((dispatched.outputs, dispatched.scores))
        self.wait_s += time.perf_counter() - start
        plan = dispatched.plan
        found: list[Sampled | Scored] = []
        if plan.score is not None:
            found.append(_scored(plan.score, scores))
        if outputs is not None:
            if plan.repeat == 1:
                outputs = jax.tree.map(lambda array: array[None], outputs)
            found += _sampled(plan.rows, outputs)
        return found

    def _prepare(self, step: Callable, *rest: object, **static: int) -> None:
        self.programs.prepare(step, self._params, self._cache, self._state, *rest, **static)

    def _dispatch_rows(self, plan: Plan) -> tuple[Outputs, tuple[int, int]]:
        arguments = (self._params, self._cache, self._state)
        if plan.decodes:
            size = self._shapes.fit_decode(len(plan.rows))
            batch = self._decode_batch(plan.rows, size)
            if plan.repeat > 1:
                run = self.programs.decode_steps
                self._cache, self._state, outputs = run(*arguments, batch, plan.repeat)
            else:
                self._cache, self._state, outputs = self.programs.decode(*arguments, batch)
            return outputs, (size, size)
        shape = self._shapes.fit_prefill(plan.n_tokens, len(plan.rows))
        mixed = self._prefill_batch(plan.rows, *shape)
        self._cache, self._state, outputs = self.programs.prefill(*arguments, mixed)
        return outputs, shape

    def _dispatch_score(self, rows: Rows) -> Scores:
        batch = self._prefill_batch((rows,), self._shapes.score, 1)
        targets = _integers(self._shapes.score, 0)
        end = rows.start + rows.count
        targets[: rows.count] = rows.sequence.tokens[rows.start + 1 : end + 1]
        self._cache, self._state, scores = self.programs.score(
            self._params, self._cache, self._state, batch, targets
        )
        return scores

    def _state_row(
        self, tokens: Sequence[int], prompt_len: int, cached: int, params: SamplingParams
    ) -> State:
        """What the state knows of a sequence that starts, without the axis of slots."""
        history = np.zeros(self._context, np.int32)
        history[: len(tokens)] = tokens
        packed = pack_sampling([params], self._config.vocab_size, [prompt_len], self._end_ids)
        row: dict[str, Any] = {
            "tokens": np.int32(tokens[-1]),
            "lengths": np.int32(cached),
            "history": history,
            "sampling": jax.tree.map(lambda array: array[0], packed),
        }
        return State(**row)

    def _list_pages(self, sequence: Scheduled) -> None:
        """Brings the page table's row of a sequence up to date."""
        slot, pages = sequence.slot, sequence.pages
        if self._listed[slot] != pages:
            self._table[slot, : len(pages)] = pages
            self._listed[slot] = list(pages)

    def _prefill_batch(self, plan: Sequence[Rows], n_rows: int, size: int) -> PrefillBatch:
        tokens, cached = _integers(n_rows, 0), _integers(size, 0)
        query_start, slots = _integers(size + 1, 0), _integers(size, self._slots)
        samples: Any = np.zeros(size, bool)
        at = 0
        for b, rows in enumerate(plan):
            known = rows.sequence.tokens[rows.start : rows.start + rows.count]
            tokens[at : at + rows.count] = known or NEWEST
            at += rows.count
            query_start[b + 1] = at
            cached[b] = rows.start
            slots[b] = rows.sequence.slot
            samples[b] = rows.samples > 0
        query_start[len(plan) + 1 :] = at
        return PrefillBatch(tokens, query_start, cached, self._table[slots], slots, samples)

    def _decode_batch(self, plan: Sequence[Rows], size: int) -> DecodeBatch:
        slots, limits = _integers(size, self._slots), _integers(size, 0)
        for b, rows in enumerate(plan):
            slots[b] = rows.sequence.slot
            limits[b] = rows.start + rows.samples
        return DecodeBatch(self._table[slots], slots, limits)


def _integers(count: int, value: int) -> Any:
    """int32 `[count]`, on the host; steps take it for an array of the device."""
    return np.full(count, value, np.int32)


def _scored(rows: Rows, scores: Scores) -> Scored:
    count = rows.count
    return Scored(
        rows,
        scores.logprobs[:count].tolist(),
        scores.top_ids[:count].tolist(),
        scores.top_logprobs[:count].tolist(),
    )


def _sampled(plan: Sequence[Rows], outputs: Outputs) -> list[Sampled]:
    """The outputs `[steps, B]` of a step, taken apart by sequence."""
    tokens, logprobs = outputs.tokens.T.tolist(), outputs.logprobs.T.tolist()
    finite = outputs.finite.T.tolist()
    wanted = (outputs.top_ids[0, :, 0] >= 0).tolist()
    found = []
    for b, rows in enumerate(plan):
        n, top_ids, top_logprobs = rows.samples, [], []
        if wanted[b]:
            top_ids = outputs.top_ids[:n, b].tolist()
            top_logprobs = outputs.top_logprobs[:n, b].tolist()
        one = (finite[b][: max(n, 1)], tokens[b][:n], logprobs[b][:n], top_ids, top_logprobs)
        found.append(Sampled(rows, *one))
    return found
