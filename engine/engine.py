"""Continuous batching: many requests share every reading of the weights."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Generator, Hashable, Sequence

from ..models.errors import StokerError
from ..models.loading import Model
from ..models.pages import whole_page_tokens
from .accounting import CacheReads, weight_bytes
from .capacity import choose_pages
from .ledger import Ledger
from .pages import Pages
from .parts import Parts
from .progress import reply_bar
from .prompts import Prompt, encode_prompt, reply_limit
from .replies import ABORT, ERROR, Choice, Delta, Reply, Times
from .runner import Advance, Dispatched, Runner
from .sampling_params import SamplingParams
from .scheduler import Scheduler
from .sequences import Rows
from .shapes import Shapes, choose_shapes
from .stats import EngineStats

_LOG = logging.getLogger("stoker")


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
      decode_steps: as given.
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
        parts = config.split.degree("slots")
        slots = -(-slots // parts)  # from here on, those of each part
        if decode_steps < 1:
            raise StokerError(f"decode_steps is {decode_steps}; it must be at least 1")
        self.model = model
        self.slots = slots * parts
        self.context = context
        self.shapes = choose_shapes(slots, step_tokens) if shapes is None else shapes
        self.shapes.check(slots)
        self.n_pages = choose_pages(config, slots, context, pages, kv_bytes)
        self.stats = EngineStats()
        self.decode_steps = decode_steps
        self._tokenizer = model.tokenizer
        self._end_ids = frozenset(model.tokenizer.stop_ids) if model.tokenizer else frozenset()
        self._parts = Parts(
            Scheduler(
                Pages(self.n_pages, whole_page_tokens(config), share=prefix_cache),
                slots=slots,
                step_tokens=self.shapes.step_tokens,
                score_tokens=self.shapes.score,
                repeat=decode_steps,
                mixed=mixed,
            )
            for _ in range(parts)
        )
        self.runner = Runner(
            model.params,
            config,
            self.shapes,
            slots=slots,
            context=context,
            n_pages=self.n_pages,
            end_ids=sorted(self._end_ids),
            mesh=model.mesh,
            team=model.team,
        )
        self._weights = weight_bytes(config, model.params)
        self._reads = CacheReads(config)
        self._ledger = Ledger(self._parts, self.stats, self._tokenizer, self._end_ids)
        self._streaming: dict[str, list[Delta]] = {}
        self._names = itertools.count()
        self._inflight: Dispatched | None = None

    def __str__(self) -> str:
        cache = self.runner.cache_bytes
        return (
            f"{self.slots} slots of {self.context} tokens on {self.n_pages} pages "
            f"({cache / 1e6:.0f} MB of KV cache); {self.shapes}"
        )

    @property
    def pages(self) -> Pages:
        """The books of the cache's pages, to read; on a mesh, of its data axis's first part."""
        return self._parts.schedulers[0].pages

    @property
    def all_pages(self) -> tuple[Pages, ...]:
        """The same of each part."""
        return tuple(part.pages for part in self._parts.schedulers)

    @property
    def unfinished(self) -> int:
        """Requests under way."""
        return len(self._ledger.requests)

    @property
    def running(self) -> int:
        """Sequences that have a slot."""
        return len(self._parts.running)

    @property
    def waiting(self) -> int:
        """Sequences that wait for a slot or for pages."""
        return len(self._parts.waiting)

    def warmup(self, prompt_len: int | None = None, advance: Advance | None = None) -> None:
        """Compiles every shape, so that no request has to wait for it; later ones are warned of.

        With `prompt_len`, only what one prompt of so many tokens takes on its own.
        """
        self.runner.warmup(self.decode_steps, prompt_len, advance)

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
        if not isinstance(params, SamplingParams):
            raise StokerError(f"params is {params!r:.40}; it must be SamplingParams, or None")
        ids = encode_prompt(prompt, self._tokenizer)
        limit = self.check(ids, params)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise StokerError(f"priority is {priority!r}; it must be a whole number")
        try:
            hash(salt)
        except TypeError:
            raise StokerError(f"salt is {salt!r}; it must be hashable, as strings are") from None
        name = request_id
        while name is None or (request_id is None and name in self._ledger.requests):
            name = f"request-{next(self._names)}"
        if name in self._ledger.requests:
            raise StokerError(f"request '{name}' is under way already; give another id")
        times = Times(arrived=time.perf_counter())
        reply = Reply(name, ids, [Choice(index) for index in range(params.n)], times)
        if params.prompt_logprobs is not None:
            reply.prompt_logprobs = [None] * len(ids)
            reply.prompt_alternatives = [None] * len(ids)
        self._ledger.open(reply, params, limit, priority, salt)
        return reply

    def check(self, ids: Sequence[int], params: SamplingParams) -> int:
        """Most tokens that may follow a prompt.

        Raises:
          StokerError: for a request that can never be answered.
        """
        return reply_limit(
            ids,
            params,
            vocab_size=self.model.config.vocab_size,
            context=self.context,
            tokenizer=self._tokenizer,
        )

    def abort(self, request_id: str) -> None:
        """Ends a request; a name that is not under way is ignored. The next `step` tells of it."""
        request = self._ledger.requests.get(request_id)
        if request is not None:
            for sequence in list(request.sequences):
                self._ledger.close(sequence, ABORT)

    def step(self) -> list[Delta]:
        """Plans and dispatches one step, then reads the one before; returns what that added.

        An error of the device, or an interruption, loses no request: what was running is computed
        again. A request fails only where that happens twice and it gained no token in between.
        """
        start, waited = time.perf_counter(), self.runner.wait_s
        worked, failure = True, None
        try:
            worked = self._step()
        except Exception as error:
            _LOG.exception("a step failed")
            # Its frames hold arrays of the device, whose memory recovery needs.
            failure = error.with_traceback(None)
        except BaseException:
            self._recover(None)
            raise
        if failure is not None:
            self._recover(failure)
        self.stats.preemptions = self._parts.preemptions
        self.stats.busy_s += time.perf_counter() - start
        self.stats.wait_s += self.runner.wait_s - waited
        deltas = self._ledger.take_deltas()
        if not worked and not deltas and self.unfinished:
            raise RuntimeError(f"nothing can run, but {self.unfinished} requests wait")
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
        answers: list[Reply] = []
        try:
            for prompt, wanted in zip(prompts, params, strict=True):
                answers.append(self._add_or_fail(prompt, wanted))
            with reply_bar(len(answers), progress) as show:
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
        left = len(reply.choices)
        mine = self._streaming[reply.id] = []
        try:
            while left:
                # Another stream's step may have brought some already.
                if not mine:
                    for delta in self.step():
                        if (listening := self._streaming.get(delta.reply.id)) is not None:
                            listening.append(delta)
                while mine:
                    delta = mine.pop(0)
                    left -= delta.finished
                    yield delta
        finally:
            del self._streaming[reply.id]
            self.abort(reply.id)
        if reply.error:
            raise StokerError(reply.error)

    def reset_prefix_cache(self) -> None:
        """Forgets every page that no running sequence holds."""
        for pages in self.all_pages:
            pages.clear()

    def _step(self) -> bool:
        """Whether there was anything to do."""
        plans = self._parts.plan()
        previous, self._inflight = self._inflight, None
        if plans is not None:
            now = time.perf_counter()
            for sequence in (s for plan in plans if plan for s in plan.admitted):
                times = self._ledger.streams[sequence].request.reply.times
                times.started = times.started or now
            self._inflight = self.runner.dispatch(plans, lambda s: self._ledger.streams[s].params)
            sent = self._inflight
            sizes = (sent.shape[0], self.shapes.score)
            self.stats.count(sent.plans, sizes, self._weights.read, self._kv_bytes)
        elif previous is None:
            return False
        if previous is not None:
            for found in self.runner.read(previous):
                self._ledger.note(found)
        return True

    def _add_or_fail(self, prompt: Prompt, params: SamplingParams) -> Reply:
        try:
            return self.add(prompt, params)
        except StokerError as error:
            choice = Choice(0, finish_reason=ERROR, error=str(error))
            return Reply("", [], [choice], Times(arrived=time.perf_counter()))

    def _recover(self, error: Exception | None) -> None:
        """Starts over with an empty cache; everything that was running is computed again."""
        if error is not None:
            self.stats.failures += 1
            for sequence in list(self._parts.running):
                sequence.failures += 1
                if sequence.failures == 2:
                    self._ledger.close(sequence, ERROR, f"its steps failed twice: {error}")
        self._inflight = None
        self._parts.restart()
        self.runner.reset()

    def _kv_bytes(self, plan: Sequence[Rows]) -> float:
        """Bytes of the cache that these rows read, and those that they write."""
        written = self.runner.token_bytes * sum(rows.count for rows in plan)
        return written + sum(self._reads.read(r.start + r.count, r.count) for r in plan)
