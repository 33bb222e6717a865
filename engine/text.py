"""From tokens to text: streaming with stop strings, and the finished reply."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator, Sequence

from ..models.tokenizers import Detokenizer, Tokenizer
from .sampling_params import SamplingParams
from .session import Session, Token


class StopStrings:
    """Cuts a stream of text at the first stop string, holding back only what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Adds text and returns what may be shown; sets `stopped` at a stop string."""
        self._held += text
        # The one that ends first, as if characters came one by one: then how text is cut into
        # tokens changes nothing, even where one stop string holds another.
        starts = {stop: self._held.find(stop) for stop in self._stops}
        found = [(at + len(stop), at) for stop, at in starts.items() if at >= 0]
        if found:
            self.stopped = True
            shown, self._held = self._held[: min(found)[1]], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """What was held back, at the end of a reply that met no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that begins `stop`, in characters."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


@dataclasses.dataclass
class Reply:
    """A reply while it grows, complete once its stream has ended.

    Attributes:
      prompt_ids: the prompt's tokens.
      ids: every generated token, the end token included.
      logprobs: of each of `ids`, under the model itself.
      text: the reply, without end token and stop string.
      finish_reason: "stop" for an end token or stop string, "length" for a limit.
      reused_tokens: prompt tokens that were in the cache already.
      ttft_s: seconds from the request to the first token.
      decode_s: seconds from the first token to the last.
    """

    prompt_ids: list[int]
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    text: str = ""
    finish_reason: str = "length"
    reused_tokens: int = 0
    ttft_s: float = 0.0
    decode_s: float = 0.0

    @property
    def decode_steps(self) -> int:
        """Decode steps that the reply took: the first token comes from prefill."""
        return max(len(self.ids) - 1, 0)

    @property
    def decode_tok_s(self) -> float:
        """Tokens per second after the first; 0 for a reply of one token."""
        return self.decode_steps / self.decode_s if self.decode_s > 0 else 0.0


def stream_reply(
    session: Session, tokenizer: Tokenizer, reply: Reply, params: SamplingParams
) -> Generator[str, None, None]:
    """Answers `reply.prompt_ids`, yielding text as soon as it is certain, and fills `reply`.

    Raises:
      StokerError: as `Session.generate`.
    """
    start = time.perf_counter()
    detokenizer = Detokenizer(tokenizer, skip_special=True, continuation=True)
    stops = StopStrings(params.stop)

    def show(text: str) -> str:
        reply.text += text
        return text

    for token in session.generate(reply.prompt_ids, params, tokenizer.stop_ids):
        now = time.perf_counter()
        if not reply.ids:
            reply.ttft_s = now - start
            reply.reused_tokens = session.reused
        reply.decode_s = now - start - reply.ttft_s
        _record(reply, token)
        if token.id in tokenizer.stop_ids and not params.ignore_eos:
            reply.finish_reason = "stop"
            break
        if text := stops.push(detokenizer.push(token.id)):
            yield show(text)
        if stops.stopped:
            reply.finish_reason = "stop"
            return
    tail = stops.push(detokenizer.flush())
    if stops.stopped:
        reply.finish_reason = "stop"
    if tail := tail + stops.flush():
        yield show(tail)


def _record(reply: Reply, token: Token) -> None:
    reply.ids.append(token.id)
    reply.logprobs.append(token.logprob)
