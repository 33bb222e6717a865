"""Replays requests that arrive over time, and says how long they waited."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..models.errors import StokerError
from .engine import Engine
from .replies import Reply
from .sampling_params import SamplingParams

#: Told how many requests are done, of how many.
Advance = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class Arrival:
    """One request of a trace.

    Attributes:
      at: seconds after the start.
      prompt_len: tokens of its prompt.
      gen_len: tokens to generate.
      shared_len: leading tokens that it shares with every other request of the same `group`.
      group: which shared beginning it has.
    """

    at: float
    prompt_len: int
    gen_len: int
    shared_len: int = 0
    group: int = 0

    def __post_init__(self) -> None:
        counts = (self.prompt_len, self.gen_len, self.shared_len, self.group)
        if any(type(count) is not int for count in counts):
            raise StokerError(f"lengths and groups of a trace are whole numbers, not {counts}")
        if isinstance(self.at, bool) or not isinstance(self.at, int | float):
            raise StokerError(f"'at' must be a number of seconds, not {self.at!r}")
        if not (math.isfinite(self.at) and self.at >= 0):
            raise StokerError(f"a request arrives at {self.at} s; it must be 0 or later")
        if self.prompt_len < 1 or self.gen_len < 1 or not 0 <= self.shared_len <= self.prompt_len:
            raise StokerError(
                f"a request of {self.prompt_len} prompt tokens, {self.shared_len} of them shared, "
                f"and {self.gen_len} to generate cannot be"
            )


@dataclasses.dataclass(frozen=True)
class Replay:
    """What became of a trace.

    Attributes:
      seconds: from the start to the last token.
      replies: in order of arrival.
      lateness_s: of each request, from its arrival to the engine's hearing of it: while a step
        runs, nobody listens.
      occupancy: sequences of the average step.
      host_share: Python's share of the time.
    """

    seconds: float
    replies: tuple[Reply, ...]
    lateness_s: tuple[float, ...]
    occupancy: float
    host_share: float

    @property
    def generated_tok_s(self) -> float:
        """Tokens generated per second, all requests together."""
        return sum(reply.generated_tokens for reply in self.replies) / self.seconds

    def ttft_s(self) -> np.ndarray:
        """Seconds from each arrival to the first token."""
        late = zip(self.lateness_s, self.replies, strict=True)
        return np.array([lateness + reply.times.ttft_s for lateness, reply in late])

    def tpot_s(self) -> np.ndarray:
        """Seconds per token after the first, of each request that has more than one."""
        return np.array([r.tpot_s for r in self.replies if r.generated_tokens > 1] or [0.0])

    def queue_s(self) -> np.ndarray:
        """Seconds from each arrival to the first step that ran it."""
        late = zip(self.lateness_s, self.replies, strict=True)
        return np.array([lateness + reply.times.queue_s for lateness, reply in late])


def poisson_trace(
    rate: float, count: int, prompt_len: int, gen_len: int, *, shared_len: int = 0, seed: int = 0
) -> list[Arrival]:
    """`count` requests that arrive at random, `rate` in an average second (inf for all at once).

    Lengths are those given, times a factor from 0.5 to 1.5 that differs from request to request.
    """
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(1 / rate, count)) if math.isfinite(rate) else np.zeros(count)
    factors = rng.uniform(0.5, 1.5, (count, 2))
    return [
        Arrival(
            at=float(when - at[0]),
            prompt_len=shared_len + max(round(prompt_len * of_prompt), 1),
            gen_len=max(round(gen_len * of_reply), 1),
            shared_len=shared_len,
        )
        for when, (of_prompt, of_reply) in zip(at, factors, strict=True)
    ]


def parse_trace(text: str) -> list[Arrival]:
    """The arrivals of a JSON list of objects with the fields of `Arrival`, in order of time.

    Raises:
      StokerError: naming the entry that is wrong, and why.
    """
    try:
        entries: Any = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise StokerError(f"the trace is not JSON: {error}") from None
    if not isinstance(entries, list) or not entries:
        raise StokerError("the trace must be a JSON list of at least one request")
    arrivals = []
    for number, entry in enumerate(entries):
        try:
            arrivals.append(Arrival(**entry))
        except (TypeError, StokerError) as error:
            fields = ", ".join(field.name for field in dataclasses.fields(Arrival))
            raise StokerError(
                f"request {number} of the trace is wrong: {error}; it is an object of {fields}"
            ) from None
    return sorted(arrivals, key=lambda arrival: arrival.at)


def replay(
    engine: Engine,
    trace: Sequence[Arrival],
    *,
    seed: int = 0,
    advance: Advance = lambda done, total: None,
) -> Replay:
    """Runs a trace in real time, on random prompts.

    Raises:
      StokerError: if a request can never be answered by this engine, or fails.
    """
    rng = np.random.default_rng(seed)
    vocabulary = engine.model.config.vocab_size
    longest: dict[int, int] = {}
    for arrival in trace:
        longest[arrival.group] = max(longest.get(arrival.group, 0), arrival.shared_len)
    shared = {group: rng.integers(0, vocabulary, n).tolist() for group, n in longest.items()}
    requests = []
    for arrival in trace:
        own = rng.integers(0, vocabulary, arrival.prompt_len - arrival.shared_len).tolist()
        ids = shared[arrival.group][: arrival.shared_len] + own
        params = SamplingParams(max_tokens=arrival.gen_len, ignore_eos=True)
        engine.check(ids, params)
        requests.append((ids, params))
    before = dataclasses.replace(engine.stats)
    replies: list[Reply] = []
    lateness: list[float] = []
    start = time.perf_counter()
    while len(replies) < len(trace) or engine.unfinished:
        now = time.perf_counter() - start
        while len(replies) < len(trace) and trace[len(replies)].at <= now:
            lateness.append(now - trace[len(replies)].at)
            replies.append(engine.add(*requests[len(replies)]))
        if engine.unfinished:
            engine.step()
            advance(sum(reply.done for reply in replies), len(trace))
        else:
            time.sleep(max(start + trace[len(replies)].at - time.perf_counter(), 0))
    seconds = time.perf_counter() - start
    for reply in replies:
        if reply.error:
            raise StokerError(reply.error)
    stats = engine.stats
    steps = stats.steps - before.steps
    return Replay(
        seconds=seconds,
        replies=tuple(replies),
        lateness_s=tuple(lateness),
        occupancy=(stats.sequences - before.sequences) / steps if steps else 0.0,
        host_share=(stats.host_s - before.host_s) / seconds,
    )
