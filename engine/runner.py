"""The device's side of an engine: cache, state and programs, and steps from plans to results."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ..models.config import ModelConfig
from ..models.parameters import Params
from ..sharding import Team
from .cache import token_bytes
from .device import DECODE, DECODE_STEPS, PREFILL, SCORE
from .hosts import new_device
from .programs import Programs
from .sampling_params import SamplingParams
from .sampling_rows import pack_ends, pack_sampling
from .sequences import Plan, Rows
from .sequences import Sequence as Scheduled
from .shapes import Shapes
from .steps import NEWEST, Outputs, Scores, State

#: Of a step, in the order that `Device.run` takes them.
Arrays = tuple[Any, ...]
#: What each part of the mesh's data axis runs in a step.
_PartRows = Sequence[Sequence[Rows]]
#: Told how many programs are compiled, of how many.
Advance = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class Dispatched:
    """A step that the device has been given; its arrays may not be there yet.

    Attributes:
      plans: the step, of each part of the mesh's data axis; of one device there is one.
      outputs: of the parts' rows `[B]`, or `[steps, B]` where it repeats, part after part.
      scores: of their score chunks.
      shape: padded rows and sequences that each part ran.
    """

    plans: tuple[Plan | None, ...]
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
      slots: rows of the state (S); on a mesh, of each part of its data axis.
      context: most tokens of a sequence.
      n_pages: usable pages of the cache, likewise.
      end_ids: the model's end tokens: they end replies, but not before `min_tokens`.
      mesh: what the model is split over, if not on one device.
      team: ties to the other processes, where several run the model.

    Attributes:
      device: what steps run on.
      wait_s: seconds spent waiting for the device.
      token_bytes: of one token's keys and values.
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
        mesh: Mesh | None = None,
        team: Team | None = None,
    ) -> None:
        made = {"slots": slots, "context": context, "n_pages": n_pages, "mesh": mesh}
        self.device = new_device(params, config, **made, end_ids=end_ids, team=team)
        self._parts = config.split.degree("slots")
        self.wait_s = 0.0
        self.token_bytes = token_bytes(config)
        self._config = config
        self._shapes = shapes
        self._slots = slots
        self._context = context
        self._end_ids = end_ids
        self._forget_pages()

    @property
    def programs(self) -> Programs:
        """The compiled steps."""
        return self.device.programs

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache, on all devices together."""
        return sum(pages.nbytes for pages in jax.tree.leaves(self.device.cache))

    def reset(self) -> None:
        """Starts with an empty cache and state, whatever became of the old ones."""
        self.device.reset()
        self._forget_pages()

    def _forget_pages(self) -> None:
        self._listed: list[list[int]] = [[] for _ in range(self._slots * self._parts)]

    def warmup(
        self, repeat: int, prompt_len: int | None = None, advance: Advance | None = None
    ) -> None:
        """Compiles every shape, after which any further one is counted as late.

        With `prompt_len`, only those that one prompt of so many tokens takes on its own.
        """
        shapes = self._shapes
        row = self._state_row([0], 0, 0, SamplingParams(seed=0))
        self.device.admit(0, row)
        if prompt_len is not None:
            self._warm_decode(shapes.decode[0], repeat, alone=prompt_len > 1)
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
        self.device.seal()

    def _warm_decode(self, size: int, repeat: int, *, alone: bool = False) -> None:
        """With `alone`, nothing ever waits while replies go on."""
        batch = self._decode_batch(self._idle, size)
        if repeat == 1 or not alone:
            self.device.prepare(DECODE, batch)
        if repeat > 1:
            self.device.prepare(DECODE_STEPS, batch, repeat)

    def _warm_prefill(self, n_rows: int, size: int) -> None:
        self.device.prepare(PREFILL, self._prefill_batch(self._idle, n_rows, size))

    def _warm_score(self) -> None:
        n_rows = self._shapes.score
        targets = _integers(n_rows * self._parts, 0)
        self.device.prepare(SCORE, (*self._prefill_batch(self._idle, n_rows, 1), targets))

    @property
    def _idle(self) -> list[Sequence[Rows]]:
        """No rows for any part."""
        return [()] * self._parts

    def dispatch(
        self, plans: Sequence[Plan | None], params_of: Callable[[Scheduled], SamplingParams]
    ) -> Dispatched:
        """Gives the device a step, one plan to each part, and does not wait for it."""
        some = [plan for plan in plans if plan is not None]
        first = {rows.sequence: rows.start for plan in some for rows in plan.rows}
        scored = {plan.score.sequence: plan.score.start for plan in some if plan.score is not None}
        first |= scored
        for sequence in (sequence for plan in some for sequence in plan.admitted):
            row = self._state_row(
                sequence.tokens,
                sequence.prompt_len,
                first.get(sequence, 0),
                params_of(sequence),
            )
            self.device.admit(self._place(sequence), row)
        for sequence in first:
            self._list_pages(sequence)
        scores = self._dispatch_score(plans) if scored else None
        busy = any(plan.rows for plan in some)
        outputs, shape = self._dispatch_rows(plans) if busy else (None, (0, 0))
        for array in jax.tree.leaves((outputs, scores)):
            array.copy_to_host_async()
        return Dispatched(tuple(plans), outputs, scores, shape)

    def read(self, dispatched: Dispatched) -> list[Sampled | Scored]:
        """Waits for a step, and returns what it found, in the order of its plans."""
        start = time.perf_counter()
        outputs, scores = self.device.fetch((dispatched.outputs, dispatched.scores))
        self.wait_s += time.perf_counter() - start
        found: list[Sampled | Scored] = []
        for part, plan in enumerate(dispatched.plans):
            if plan is None:
                continue
            if plan.score is not None:
                found.append(_scored(plan.score, self._part_of(scores, part)))
            if plan.rows:
                # Where the step repeats, an axis of steps goes first.
                repeats = outputs.tokens.ndim == 2
                own = self._part_of(outputs, part, axis=int(repeats))
                if not repeats:
                    own = jax.tree.map(lambda array: array[None], own)
                found += _sampled(plan.rows, own)
        return found

    def _part_of(self, results: Any, part: int, axis: int = 0) -> Any:
        """One part's rows of a step's results on the host."""
        if self._parts == 1:
            return results
        return jax.tree.map(lambda array: np.split(array, self._parts, axis)[part], results)

    def _place(self, sequence: Scheduled) -> int:
        """The row of the state that a sequence has, counted over all parts."""
        return sequence.part * self._slots + sequence.slot

    def _dispatch_rows(self, plans: Sequence[Plan | None]) -> tuple[Outputs, tuple[int, int]]:
        rows = [() if plan is None else plan.rows for plan in plans]
        most = max(map(len, rows))
        if all(plan is None or plan.decodes for plan in plans):
            size = self._shapes.fit_decode(most)
            repeat = max(plan.repeat for plan in plans if plan is not None)
            step = DECODE_STEPS if repeat > 1 else DECODE
            return self.device.run(step, self._decode_batch(rows, size), repeat), (size, size)
        n_tokens = max(plan.n_tokens for plan in plans if plan is not None)
        shape = self._shapes.fit_prefill(n_tokens, most)
        return self.device.run(PREFILL, self._prefill_batch(rows, *shape)), shape

    def _dispatch_score(self, plans: Sequence[Plan | None]) -> Scores:
        n_rows = self._shapes.score
        chunks = [None if plan is None else plan.score for plan in plans]
        batch = self._prefill_batch([(rows,) if rows else () for rows in chunks], n_rows, 1)
        targets = _integers(n_rows * self._parts, 0)
        for part, rows in enumerate(chunks):
            if rows is not None:
                known = rows.sequence.tokens[rows.start + 1 : rows.start + rows.count + 1]
                targets[part * n_rows :][: rows.count] = known
        return self.device.run(SCORE, (*batch, targets))

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
            "ends": pack_ends([params], self._end_ids)[0],
            "sampling": jax.tree.map(lambda array: array[0], packed),
        }
        return State(**row)

    def _list_pages(self, sequence: Scheduled) -> None:
        """Brings the page table's row of a sequence up to date."""
        place, pages = self._place(sequence), sequence.pages
        listed = self._listed[place]
        if listed != pages:
            same = (
                at for at, (old, new) in enumerate(zip(listed, pages, strict=False)) if old != new
            )
            first = next(same, min(len(listed), len(pages)))
            self.device.list_pages(place, first, pages[first:])
            self._listed[place] = list(pages)

    def _prefill_batch(self, rows: _PartRows, n_rows: int, size: int) -> Arrays:
        return _joined([self._prefill_part(own, n_rows, size) for own in rows])

    def _decode_batch(self, rows: _PartRows, size: int) -> Arrays:
        return _joined([self._decode_part(own, size) for own in rows])

    def _prefill_part(self, plan: Sequence[Rows], n_rows: int, size: int) -> Arrays:
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
        return tokens, query_start, cached, slots, samples

    def _decode_part(self, plan: Sequence[Rows], size: int) -> Arrays:
        slots, limits = _integers(size, self._slots), _integers(size, 0)
        for b, rows in enumerate(plan):
            slots[b] = rows.sequence.slot
            limits[b] = rows.start + rows.samples
        return slots, limits


def _joined(batches: Sequence[Arrays]) -> Arrays:
    """The parts' batches, one after another."""
    if len(batches) == 1:
        return batches[0]
    return tuple(np.concatenate(arrays) for arrays in zip(*batches, strict=True))


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
