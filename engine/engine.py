"""Continuous batching: many requests share every reading of the weights."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import secrets
import time
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from ..models.errors import StokerError
from ..models.loading import Model
from .cache import PAGE_TOKENS
from .capacity import choose_pages
from .pages import Pages
from .replies import (
    ABORT,
    ERROR,
    LENGTH,
    Alternatives,
    Choice,
    Delta,
    Reply,
    Times,
    Writer,
    alternatives,
)
from .runner import Advance, Dispatched, Runner, Sampled, Scored
from .sampling_params import MAX_SEED, SamplingParams
from .scheduler import Scheduler
from .scheduler import Sequence as Scheduled
from .shapes import Shapes, choose_shapes
from .stats import EngineStats

_LOG = logging.getLogger("stoker")

Prompt = str | Sequence[int]


@dataclasses.dataclass(eq=False)
class _Request:
    """A request under way: its reply, and the sequences that still work on it."""

    reply: Reply
    params: SamplingParams
    sequences: list[Scheduled]


@dataclasses.dataclass(frozen=True, eq=False)
class _Stream:
    """One sequence's way back to its request."""

    request: _Request
    writer: Writer
    params: SamplingParams


class Engine:
    """Answers many requests at once with one model.

    `generate` takes a list of prompts. For embedding, `add` takes a request, `step` runs one step
    of everything there is and returns what it added, and `abort` ends a request. Randomness depends
    on a request's seed and the position alone, so that neighbours, slots, chunking, the prefix
    cache and preemption do not change a reply.

    Not safe for use by several threads at once; `AsyncEngine` is the front for that.

    Args:
      model: from `load_model`.
      slots: sequences that run at once (S).
      context: longest sequence, prompt and reply together, in tokens; the model's if None.
      pages: pages of the KV cache; what memory allows if None, up to every slot's being full.
      kv_bytes: limit of the KV cache in bytes, instead of `pages`.
      step_tokens: most tokens that one step runs: what bounds a running reply's wait for its next
        token while prompts are read. At least slots + 1.
      prefix_cache: keep the pages of finished sequences for prompts that begin alike.
      decode_steps: steps that the device takes at once while nothing waits. More than one saves
        host work on small models; a new request waits for all of them.
      mixed: prompts and running replies share steps, and the reading of the weights; if not, they
        take turns, which is slower and there to compare with.
      shapes: what steps are compiled for, in place of what `slots` and `step_tokens` suggest.

    Attributes:
      context, slots, n_pages: as reserved.
      shapes: what steps are compiled for.
      stats: counters.

    Raises:
      StokerError: if the options do not fit each other, the model or the memory.
    """

    def __init__(
        self,
        model: Model,
        *,
        slots: int = 32,
        context: int | None = None,
        pages: int | None = None,
        kv_bytes: int | None = None,
        step_tokens: int = 256,
        prefix_cache: bool = True,
        decode_steps: int = 1,
        mixed: bool = True,
        shapes: Shapes | None = None,
    ) -> None:
        config = model.config
        context = config.max_positions if context is None else context
        if not 1 <= context <= config.max_positions:
            raise StokerError(
                f"a context of {context} tokens was asked for; this model takes from 1 to "
                f"{config.max_positions}"
            )
        config = config.for_context(context)
        if decode_steps < 1:
            raise StokerError(f"decode_steps is {decode_steps}; it must be at least 1")
        self.model = model
        self.slots = slots
        self.context = context
        self.n_pages = choose_pages(config, slots, context, pages, kv_bytes)
        self.shapes = choose_shapes(slots, step_tokens) if shapes is None else shapes
        self.shapes.check(slots)
        self.stats = EngineStats()
        self._decode_steps = decode_steps
        self._tokenizer = model.tokenizer
        self._end_ids = frozenset(model.tokenizer.stop_ids) if model.tokenizer else frozenset()
        self._pages = Pages(self.n_pages, PAGE_TOKENS, share=prefix_cache)
        self._scheduler = Scheduler(
            self._pages,
            slots=slots,
            step_tokens=self.shapes.step_tokens,
            score_tokens=self.shapes.score,
            repeat=decode_steps,
            mixed=mixed,
        )
        self.runner = Runner(
            model.params,
            config,
            self.shapes,
            slots=slots,
            context=context,
            n_pages=self.n_pages,
            end_ids=sorted(self._end_ids),
        )
        self._requests: dict[str, _Request] = {}
        self._streams: dict[Scheduled, _Stream] = {}
        self._names = itertools.count()
        self._numbers = itertools.count()
        self._deltas: list[Delta] = []
        self._inflight: Dispatched | None = None
        self._failed_before = False

    def __str__(self) -> str:
        cache = self.runner.cache_bytes
        return (
            f"{self.slots} slots of {self.context} tokens on {self.n_pages} pages "
            f"({cache / 1e6:.0f} MB of KV cache); {self.shapes}"
        )

    @property
    def pages(self) -> Pages:
        """The books of the cache's pages, to read."""
        return self._pages

    @property
    def unfinished(self) -> int:
        """Requests under way."""
        return len(self._requests)

    @property
    def running(self) -> int:
        """Sequences that have a slot."""
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        """Sequences that wait for a slot or for pages."""
        return len(self._scheduler.waiting)

    def warmup(self, prompt_len: int | None = None, advance: Advance | None = None) -> None:
        """Compiles every shape, so that no request has to wait for it; later ones are warned of.

        With `prompt_len`, only what one prompt of so many tokens takes on its own.
        """
        self.runner.warmup(self._decode_steps, prompt_len, advance)

    @property
    def compile_s(self) -> float:
        """Seconds spent compiling so far."""
        return sum(program.seconds for program in self.runner.programs.compilations)

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        salt: Hashable = None,
    ) -> Reply:
        """Takes a request; `step` works on it. Returns its reply, which grows.

        Args:
          prompt: text, encoded with the model's begin token, or token ids, taken as they are.
          params: how to generate; greedy to the end of the context if None.
          request_id: a name of its own; made up if None.
          priority: requests of higher priority go first, and keep their pages longer.
          salt: only requests of the same salt share cached pages.

        Raises:
          StokerError: if the request can never be answered; then nothing has changed.
        """
        params = SamplingParams() if params is None else params
        ids = self.encode(prompt)
        limit = self.check(ids, params)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise StokerError(f"priority is {priority!r}; it must be a whole number")
        try:
            hash(salt)
        except TypeError:
            raise StokerError(f"salt is {salt!r}; it must be hashable, as strings are") from None
        name = f"request-{next(self._names)}" if request_id is None else request_id
        if name in self._requests:
            raise StokerError(f"request '{name}' is under way already; give another id")
        times = Times(arrived=time.perf_counter())
        reply = Reply(name, ids, [Choice(index) for index in range(params.n)], times)
        if params.prompt_logprobs is not None:
            reply.prompt_logprobs = [None] * len(ids)
            reply.prompt_alternatives = [None] * len(ids)
        request = _Request(reply, params, [])
        self._requests[name] = request
        for choice in reply.choices:
            self._begin(request, choice, limit, priority, salt)
        return reply

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.

        Raises:
          StokerError: for text that the model has no tokenizer for, or ids that are no whole
            numbers.
        """
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise StokerError("this model has no tokenizer; give the prompt as token ids")
            return self._tokenizer.encode(prompt)
        ids = list(prompt)
        for token in ids:
            if isinstance(token, bool) or not hasattr(token, "__index__"):
                raise StokerError(f"the prompt holds {token!r}; it takes text, or whole numbers")
        return [int(token) for token in ids]

    def abort(self, request_id: str) -> None:
        """Ends a request; a name that is not under way is ignored. The next `step` tells of it."""
        request = self._requests.get(request_id)
        if request is not None:
            for sequence in list(request.sequences):
                self._close(sequence, ABORT)

    def step(self) -> list[Delta]:
        """Plans and dispatches one step, then reads the one before; returns what that added.

        An error of the device, or an interruption, loses no request: what was running is computed
        again. Requests fail only where their steps fail twice in a row.
        """
        start, waited = time.perf_counter(), self.runner.wait_s
        worked = True
        try:
            worked = self._step()
        except Exception as error:
            _LOG.exception("a step failed")
            self._recover(error)
        except BaseException:
            self._recover(None)
            raise
        self.stats.preemptions = self._scheduler.preemptions
        self.stats.busy_s += time.perf_counter() - start
        self.stats.wait_s += self.runner.wait_s - waited
        deltas, self._deltas = self._deltas, []
        if not worked and not deltas and self._requests:
            raise RuntimeError(f"nothing can run, but {len(self._requests)} requests wait")
        return deltas

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Reply]:
        """The replies to many prompts, in their order.

        A prompt that cannot be answered has a reply whose `error` says why; the others are not
        affected.

        Args:
          prompts: as of `add`.
          params: for all of them, or a list of one for each.
          progress: show a bar, where standard error is a terminal.

        Raises:
          StokerError: if `prompts` is one text, or the lists differ in length.
        """
        if isinstance(prompts, str):
            raise StokerError("generate takes a list of prompts; put the text into a list")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise StokerError(
                f"{len(prompts)} prompts came with {len(params)} sampling parameters; give one for "
                "each, or one for all"
            )
        answers = [self._add_or_fail(*pair) for pair in zip(prompts, params, strict=True)]
        try:
            with _bar(len(answers), progress) as show:
                while any(not answer.done for answer in answers):
                    self.step()
                    show(answers)
        except BaseException:
            for answer in answers:
                self.abort(answer.id)
            raise
        return answers

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[Delta, None, None]:
        """What each step adds to the reply to one prompt; leaving early ends it.

        Raises:
          StokerError: as `add`, or where the reply fails.
        """
        reply = self.add(prompt, params)
        try:
            while not reply.done:
                for delta in self.step():
                    if delta.reply is reply:
                        yield delta
        finally:
            self.abort(reply.id)
        if reply.error:
            raise StokerError(reply.error)

    def reset_prefix_cache(self) -> None:
        """Forgets every page that no running sequence holds."""
        self._pages.clear()

    def _step(self) -> bool:
        """Whether there was anything to do."""
        plan = self._scheduler.plan()
        previous, self._inflight = self._inflight, None
        if plan is not None:
            now = time.perf_counter()
            for sequence in plan.admitted:
                times = self._streams[sequence].request.reply.times
                times.started = times.started or now
            self._inflight = self.runner.dispatch(plan, self._params_of)
            self._count(self._inflight)
        elif previous is None:
            return False
        if previous is not None:
            sampled, scored = self.runner.read(previous)
            self._failed_before = False
            if scored is not None:
                self._guard(scored.rows.sequence, self._note_scores, scored)
            for found in sampled:
                self._guard(found.rows.sequence, self._note_tokens, found)
        return True

    def check(self, ids: Sequence[int], params: SamplingParams) -> int:
        """Most tokens that may follow a prompt.

        Raises:
          StokerError: for a request that can never be answered.
        """
        vocabulary = self.model.config.vocab_size
        if not ids:
            raise StokerError("the prompt is empty; give at least one token")
        for token in ids:
            if not 0 <= token < vocabulary:
                raise StokerError(f"token id {token} is not in the vocabulary of {vocabulary}")
        room = self.context - len(ids)
        if room < (params.max_tokens != 0):
            raise StokerError(
                f"the prompt has {len(ids)} tokens, but the context holds {self.context}, reply "
                "included; shorten the prompt"
            )
        params.check(vocabulary)
        if params.stop and self._tokenizer is None:
            raise StokerError("stop strings need a tokenizer, which this model lacks; use stop_ids")
        return room if params.max_tokens is None else min(params.max_tokens, room)

    def _begin(
        self, request: _Request, choice: Choice, limit: int, priority: int, salt: Hashable
    ) -> None:
        params = request.params.child(choice.index)
        if params.seed is None:
            # Drawn once: a sequence that is preempted goes on with the same.
            params = dataclasses.replace(params, seed=secrets.randbelow(MAX_SEED))
        ids = request.reply.prompt_ids
        sequence = Scheduled(
            next(self._numbers),
            list(ids),
            len(ids),
            len(ids) + limit,
            priority=priority,
            namespace=salt,
            scored=params.prompt_logprobs is not None and choice.index == 0,
        )
        request.sequences.append(sequence)
        writer = Writer(choice, params, self._tokenizer, self._end_ids, limit)
        self._streams[sequence] = _Stream(request, writer, params)
        self._scheduler.add(sequence)
        if limit == 0 and not sequence.scoring:
            self._close(sequence, LENGTH)

    def _add_or_fail(self, prompt: Prompt, params: SamplingParams) -> Reply:
        try:
            return self.add(prompt, params)
        except StokerError as error:
            choice = Choice(0, finish_reason=ERROR, error=str(error))
            return Reply("", [], [choice], Times(arrived=time.perf_counter()))

    def _params_of(self, sequence: Scheduled) -> SamplingParams:
        return self._streams[sequence].params

    def _guard(self, sequence: Scheduled, note: Callable[..., None], found: Any) -> None:
        """Takes note of one sequence's results; what goes wrong there is its failure alone."""
        if sequence.done:
            self.stats.surplus_tokens += found.rows.samples
            return
        try:
            note(self._streams[sequence], found)
        except Exception as error:
            _LOG.exception("a request failed")
            self._close(sequence, ERROR, f"the reply could not be processed: {error}")

    def _note_tokens(self, stream: _Stream, found: Sampled) -> None:
        sequence, choice = found.rows.sequence, stream.writer.choice
        text: list[str] = []
        before = len(choice.ids)
        wanted = stream.params.logprobs
        for at, token in enumerate(found.tokens):
            if not found.finite[at]:
                break
            self._scheduler.accept(sequence, token)
            beside: Alternatives | None = None
            if wanted is not None:
                beside = ()
                if found.top_ids:
                    beside = alternatives(found.top_ids[at], found.top_logprobs[at], wanted)
            text.append(stream.writer.push(token, found.logprobs[at], beside))
            if choice.finish_reason:
                break
        new = tuple(choice.ids[before:])
        times = stream.request.reply.times
        if new and not times.first_token:
            times.first_token = time.perf_counter()
        self.stats.generated_tokens += len(new)
        if not all(found.finite[: len(new) + 1]) and not choice.finish_reason:
            self._scheduler.forget(sequence)
            self._deltas.append(Delta(stream.request.reply, choice, "".join(text), new, False))
            self._close(
                sequence,
                ERROR,
                f"the model's logits are not finite after {len(sequence.tokens)} tokens; the "
                "weights may be damaged, or need a wider dtype",
            )
            return
        self.stats.surplus_tokens += len(found.tokens) - len(new)
        if new:
            finished = choice.finish_reason is not None
            delta = Delta(stream.request.reply, choice, "".join(text), new, finished)
            self._deltas.append(delta)
            if finished:
                self._retire(sequence)

    def _note_scores(self, stream: _Stream, found: Scored) -> None:
        sequence, reply = found.rows.sequence, stream.request.reply
        assert reply.prompt_logprobs is not None and reply.prompt_alternatives is not None
        for at, logprob in enumerate(found.logprobs):
            if not math.isfinite(logprob):
                self._scheduler.forget(sequence)
                raise StokerError(
                    f"the model's logits are not finite after {found.rows.start + at + 1} tokens"
                )
            position = found.rows.start + at + 1
            reply.prompt_logprobs[position] = logprob
            reply.prompt_alternatives[position] = alternatives(
                found.top_ids[at], found.top_logprobs[at], stream.params.prompt_logprobs or 0
            )
        if found.rows.start + found.rows.count == sequence.prompt_len - 1:
            # Known now, even if the sequence is preempted and computed again.
            sequence.scored = False
            if sequence.max_len == sequence.prompt_len:
                self._close(sequence, LENGTH)

    def _close(self, sequence: Scheduled, reason: str, error: str | None = None) -> None:
        """Ends a sequence before its time."""
        stream = self._streams[sequence]
        text = stream.writer.close(reason, error)
        choice = stream.writer.choice
        self._deltas.append(Delta(stream.request.reply, choice, text, (), True))
        self._retire(sequence)

    def _retire(self, sequence: Scheduled) -> None:
        """Clears away a sequence whose choice is complete."""
        self._scheduler.finish(sequence)
        stream = self._streams.pop(sequence)
        request, choice = stream.request, stream.writer.choice
        choice.preemptions = sequence.preemptions
        reason = choice.finish_reason or ""
        self.stats.finished[reason] = self.stats.finished.get(reason, 0) + 1
        self.stats.prompt_tokens += sequence.prompt_len
        self.stats.cached_tokens += sequence.cached
        if choice.index == 0:
            request.reply.cached_tokens = sequence.cached
        request.sequences.remove(sequence)
        if not request.sequences:
            request.reply.times.finished = time.perf_counter()
            del self._requests[request.reply.id]

    def _recover(self, error: Exception | None) -> None:
        """Starts over with an empty cache; everything that was running is computed again."""
        if error is not None:
            self.stats.failures += 1
            if self._failed_before:
                for sequence in list(self._scheduler.running):
                    self._close(sequence, ERROR, f"the step failed twice: {error}")
            self._failed_before = not self._failed_before
        self._inflight = None
        self._scheduler.restart()
        self.runner.reset()

    def _count(self, dispatched: Dispatched) -> None:
        plan, stats = dispatched.plan, self.stats
        n_rows = plan.n_tokens * plan.repeat
        stats.steps += plan.repeat
        stats.decode_steps += plan.repeat if plan.rows and plan.decodes else 0
        stats.rows += n_rows
        stats.padded_rows += dispatched.shape[0] * plan.repeat - n_rows
        stats.sequences += len(plan.rows) * plan.repeat
        if plan.score is not None:
            stats.rows += plan.score.count
            stats.padded_rows += self.shapes.score - plan.score.count


@contextlib.contextmanager
def _bar(total: int, wanted: bool) -> Iterator[Callable[[list[Reply]], None]]:
    """A progress bar on a terminal; yields what tells it how far the replies are."""
    console = Console(stderr=True)
    if not wanted or not console.is_terminal:
        yield lambda _: None
        return
    columns = (
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("generating", total=total, tokens=0)

        def show(answers: list[Reply]) -> None:
            done = sum(answer.done for answer in answers)
            tokens = sum(answer.generated_tokens for answer in answers)
            progress.update(task, completed=done, tokens=tokens)

        yield show
