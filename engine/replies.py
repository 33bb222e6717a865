"""What a request becomes: its replies as they grow, and the events that tell of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

from ..models.tokenizers import Detokenizer, Tokenizer
from .sampling_params import SamplingParams
from .stop_strings import StopStrings

#: How a reply may end.
STOP, LENGTH, ABORT, ERROR = "stop", "length", "abort", "error"
#: Alternatives at one position: token ids and log-probabilities, most likely first.
Alternatives = tuple[tuple[int, float], ...]


@dataclasses.dataclass
class Choice:
    """One reply to a prompt, complete once `finish_reason` is set.

    Attributes:
      index: which of the request's n replies.
      ids: every generated token, the end token included.
      logprobs: of each of `ids`, under the model itself.
      alternatives: at each of `ids`, if the request asked for them.
      text: the reply, without end token and stop string.
      finish_reason: "stop" for an end token, stop id or stop string; "length" for a limit; "abort";
        "error"; None while it grows.
      stop: the stop string or id that ended it, where the request named it.
      error: what went wrong, in a sentence.
      preemptions: how often it gave up its pages and was computed again.
    """

    index: int
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    alternatives: list[Alternatives] = dataclasses.field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop: str | int | None = None
    error: str | None = None
    preemptions: int = 0


@dataclasses.dataclass
class Times:
    """When things happened to a request, in seconds of `time.perf_counter`; 0 for not yet."""

    arrived: float
    started: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0

    @property
    def queue_s(self) -> float:
        """From arrival to the first step that ran it."""
        return max(self.started - self.arrived, 0.0)

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token."""
        return max(self.first_token - self.arrived, 0.0)

    @property
    def decode_s(self) -> float:
        """From the first token to the end."""
        return max(self.finished - self.first_token, 0.0) if self.first_token else 0.0


@dataclasses.dataclass
class Reply:
    """A request and what has become of it.

    Attributes:
      id: of the request.
      prompt_ids: the prompt's tokens.
      choices: n of them.
      times: of arrival, start, first token and end.
      cached_tokens: prompt tokens whose computation the prefix cache saved (of the first choice).
      prompt_logprobs: of each prompt token after those before it, the first None; if asked for.
      prompt_alternatives: at each of them, likewise.
    """

    id: str
    prompt_ids: list[int]
    choices: list[Choice]
    times: Times
    cached_tokens: int = 0
    prompt_logprobs: list[float | None] | None = None
    prompt_alternatives: list[Alternatives | None] | None = None

    @property
    def done(self) -> bool:
        """Every choice is complete."""
        return all(choice.finish_reason for choice in self.choices)

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text

    @property
    def ids(self) -> list[int]:
        """Of the first choice."""
        return self.choices[0].ids

    @property
    def finish_reason(self) -> str | None:
        """Of the first choice."""
        return self.choices[0].finish_reason

    @property
    def error(self) -> str | None:
        """Of the first choice that failed."""
        return next((choice.error for choice in self.choices if choice.error), None)

    @property
    def generated_tokens(self) -> int:
        """Of all choices."""
        return sum(len(choice.ids) for choice in self.choices)

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first, of the longest choice; 0 for one token."""
        steps = max(len(choice.ids) for choice in self.choices) - 1
        return self.times.decode_s / steps if steps > 0 else 0.0


@dataclasses.dataclass(frozen=True)
class Delta:
    """What one step added to one choice.

    Attributes:
      reply: of the request, so far.
      choice: the one that grew, with this addition.
      text: that became certain: concatenated, the deltas of a choice are its text.
      ids: tokens added.
      finished: the choice is complete now.
    """

    reply: Reply
    choice: Choice
    text: str
    ids: tuple[int, ...]
    finished: bool


class Writer:
    """Turns the tokens of one choice into text, and finds out where it ends.

    Args:
      choice: to fill.
      params: of the request.
      tokenizer: None for a model without one: text stays empty.
      end_ids: tokens that end a reply of this model.
      limit: most tokens to generate.
    """

    def __init__(
        self,
        choice: Choice,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        end_ids: Collection[int],
        limit: int,
    ) -> None:
        self.choice = choice
        self._params = params
        self._end_ids = () if params.ignore_eos else end_ids
        self._limit = limit
        self._stops = StopStrings(params.stop)
        self._push: Callable[[int], str] = lambda _: ""
        self._flush: Callable[[], str] = lambda: ""
        if tokenizer is not None:
            detokenizer = Detokenizer(tokenizer, skip_special=True, continuation=True)
            size = tokenizer.vocab_size
            # Rows beyond the vocabulary, which pad some models' tables, have no text.
            self._push = lambda token: detokenizer.push(token) if token < size else ""
            self._flush = detokenizer.flush

    def push(self, token: int, logprob: float, alternatives: Alternatives | None) -> str:
        """Adds a token; returns the text that became certain, and may set `finish_reason`."""
        choice = self.choice
        choice.ids.append(token)
        choice.logprobs.append(logprob)
        if alternatives is not None:
            choice.alternatives.append(alternatives)
        text = ""
        if token in self._params.stop_ids:
            choice.finish_reason, choice.stop = STOP, token
        elif token in self._end_ids:
            choice.finish_reason = STOP
        else:
            text = self._stops.push(self._push(token))
            if self._stops.stopped:
                choice.finish_reason, choice.stop = STOP, self._stops.stop
            elif len(choice.ids) >= self._limit:
                choice.finish_reason = LENGTH
        if choice.finish_reason and not self._stops.stopped:
            text += self._end()
        choice.text += text
        return text

    def close(self, reason: str, error: str | None = None) -> str:
        """Ends the choice before its time; returns the text that was held back."""
        self.choice.finish_reason = reason
        self.choice.error = error
        text = self._end()
        self.choice.text += text
        return text

    def _end(self) -> str:
        """The text that was held back, up to a stop string that it may complete."""
        tail = self._stops.push(self._flush())
        if self._stops.stopped:
            self.choice.stop = self._stops.stop
            return tail
        return tail + self._stops.flush()


def alternatives(ids: Sequence[int], logprobs: Sequence[float], count: int) -> Alternatives:
    """The first `count` alternatives of a row of `Outputs`."""
    pairs = zip(ids[:count], logprobs[:count], strict=True)
    return tuple((token, logprob) for token, logprob in pairs if token >= 0)
