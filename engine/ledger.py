"""From what steps find to what requests are told: tokens to text, ends, errors and deltas."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import secrets
import time
from collections.abc import Collection, Hashable

from ..models.errors import StokerError
from ..models.tokenizers import Tokenizer
from .parts import Parts
from .replies import ERROR, LENGTH, Alternatives, Choice, Delta, Reply, Writer, alternatives
from .runner import Sampled, Scored
from .sampling_params import MAX_SEED, SamplingParams
from .sequences import Sequence as Scheduled
from .stats import EngineStats

_LOG = logging.getLogger("stoker")


@dataclasses.dataclass(eq=False)
class Request:
    """A request under way: its reply, and the sequences that still work on it."""

    reply: Reply
    params: SamplingParams
    sequences: list[Scheduled]


@dataclasses.dataclass(eq=False)
class Stream:
    """One sequence's way back to its request, and how much of its choice deltas have told."""

    request: Request
    writer: Writer
    params: SamplingParams
    told_ids: int = 0
    told_text: int = 0

    def delta(self) -> Delta:
        """What came to the choice since the last one."""
        choice = self.writer.choice
        ids, text = tuple(choice.ids[self.told_ids :]), choice.text[self.told_text :]
        self.told_ids, self.told_text = len(choice.ids), len(choice.text)
        finished = choice.finish_reason is not None
        return Delta(self.request.reply, choice, text, ids, finished)


class Ledger:
    """The requests under way, and the sequences that work on them.

    Args:
      scheduler: runs the sequences, on one part or several.
      stats: counts what they come to.
      tokenizer: of the model.
      end_ids: its end tokens.

    Attributes:
      requests: under way, by id.
      streams: of each sequence, back to its request.
      deltas: that nobody has been told of yet.
    """

    def __init__(
        self,
        scheduler: Parts,
        stats: EngineStats,
        tokenizer: Tokenizer | None,
        end_ids: Collection[int],
    ) -> None:
        self.requests: dict[str, Request] = {}
        self.streams: dict[Scheduled, Stream] = {}
        self.deltas: list[Delta] = []
        self._scheduler = scheduler
        self._stats = stats
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._numbers = itertools.count()

    def open(
        self, reply: Reply, params: SamplingParams, limit: int, priority: int, salt: Hashable
    ) -> None:
        """Takes a request that has been checked: a sequence for each choice joins the queue."""
        request = Request(reply, params, [])
        self.requests[reply.id] = request
        begun = [self._begin(request, choice, limit, priority, salt) for choice in reply.choices]
        for sequence in begun:
            if limit == 0 and not sequence.scoring:
                self.close(sequence, LENGTH)

    def take_deltas(self) -> list[Delta]:
        """What has been added since the last time."""
        deltas, self.deltas = self.deltas, []
        return deltas

    def note(self, found: Sampled | Scored) -> None:
        """Takes note of one sequence's results; what goes wrong there is its failure alone."""
        sequence = found.rows.sequence
        if sequence.done:
            self._stats.surplus_tokens += found.rows.samples
            return
        try:
            if isinstance(found, Sampled):
                self._note_tokens(self.streams[sequence], found)
            else:
                self._note_scores(self.streams[sequence], found)
        except Exception as error:
            _LOG.exception("a request failed")
            self.close(sequence, ERROR, f"the reply could not be processed: {error}")

    def close(self, sequence: Scheduled, reason: str, error: str | None = None) -> None:
        """Ends a sequence before its time."""
        stream = self.streams[sequence]
        stream.writer.close(reason, error)
        self.deltas.append(stream.delta())
        self._retire(sequence)

    def _retire(self, sequence: Scheduled) -> None:
        """Clears away a sequence whose choice is complete."""
        self._scheduler.finish(sequence)
        stream = self.streams.pop(sequence)
        request, choice = stream.request, stream.writer.choice
        choice.preemptions = sequence.preemptions
        reason = choice.finish_reason or ""
        self._stats.finished[reason] = self._stats.finished.get(reason, 0) + 1
        self._stats.prompt_tokens += sequence.prompt_len
        self._stats.cached_tokens += sequence.cached
        if choice.index == 0:
            request.reply.cached_tokens = sequence.cached
        request.sequences.remove(sequence)
        if not request.sequences:
            request.reply.times.finished = time.perf_counter()
            del self.requests[request.reply.id]

    def _begin(
        self, request: Request, choice: Choice, limit: int, priority: int, salt: Hashable
    ) -> Scheduled:
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
        self.streams[sequence] = Stream(request, writer, params)
        self._scheduler.add(sequence)
        return sequence

    def _note_tokens(self, stream: Stream, found: Sampled) -> None:
        sequence, choice = found.rows.sequence, stream.writer.choice
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
            stream.writer.push(token, found.logprobs[at], beside)
            if choice.finish_reason:
                break
        gained = len(choice.ids) - before
        times = stream.request.reply.times
        if gained and not times.first_token:
            times.first_token = time.perf_counter()
        self._stats.generated_tokens += gained
        if not all(found.finite[: gained + 1]) and not choice.finish_reason:
            self._scheduler.forget(sequence)
            self.close(
                sequence,
                ERROR,
                f"the model's logits are not finite after {len(sequence.tokens)} tokens; the "
                "weights may be damaged, or need a wider dtype",
            )
            return
        self._stats.surplus_tokens += len(found.tokens) - gained
        if gained:
            self.deltas.append(stream.delta())
            if choice.finish_reason:
                self._retire(sequence)

    def _note_scores(self, stream: Stream, found: Scored) -> None:
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
                self.close(sequence, LENGTH)
