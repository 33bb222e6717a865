"""Measures an engine at work: prefill, and decode at several batch sizes, against the floor."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import numpy as np

from ..models.errors import StokerError
from ..models.loading import Model
from ..models.pages import page_tokens
from .accounting import StepCost, step_cost
from .engine import Engine
from .pages import pages_for
from .replies import Reply
from .sampling_params import SamplingParams

#: Told of each finished run, for a progress bar.
Advance = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One kind of run, measured `len(seconds)` times.

    Attributes:
      name: "prefill" or "decode".
      batch: sequences at once, B.
      context: tokens of the longest sequence at the end.
      tokens: that one run computes, all sequences together.
      n_steps: that one run takes.
      seconds: of each run.
      host_s: seconds of each run that were Python's; the device may have been at work too.
      cost: what the average step must move and compute.
      compile_s: seconds to compile its programs.
    """

    name: str
    batch: int
    context: int
    tokens: int
    n_steps: int
    seconds: tuple[float, ...]
    host_s: tuple[float, ...]
    cost: StepCost
    compile_s: float

    @property
    def median_s(self) -> float:
        """Seconds of the median run."""
        return statistics.median(self.seconds)

    @property
    def tok_s(self) -> float:
        """Tokens per second of the median run, all sequences together."""
        return self.tokens / self.median_s

    @property
    def step_s(self) -> float:
        """Seconds per step of the median run."""
        return self.median_s / self.n_steps

    @property
    def host_share(self) -> float:
        """Python's share of the time, in the median run."""
        return statistics.median(self.host_s) / self.median_s

    @property
    def bytes_s(self) -> float:
        """Bytes per second that the steps must move."""
        return self.cost.bytes / self.step_s

    @property
    def operations_s(self) -> float:
        """Operations per second that the steps must compute."""
        return self.cost.operations / self.step_s


class Bench:
    """Runs an engine on random prompts, a new one for each sequence and run.

    Args:
      model: whose parameters are measured; its tokenizer is not used.
      repeats: measured runs; one more goes before them to warm up.
      seed: of the prompts.
      step_tokens: most tokens of a step.
      decode_steps: that the device takes at once.
      advance: called after each run.
    """

    def __init__(
        self,
        model: Model,
        *,
        repeats: int = 3,
        seed: int = 0,
        step_tokens: int = 256,
        decode_steps: int = 1,
        advance: Advance = lambda: None,
    ) -> None:
        self._model = dataclasses.replace(model, tokenizer=None)
        self._repeats = repeats
        self._rng = np.random.default_rng(seed)
        self._step_tokens = step_tokens
        self._decode_steps = decode_steps
        self._advance = advance

    def prefill(self, prompt_len: int) -> Measurement:
        """Time from a prompt to its first token on the host."""
        engine = self._engine(1, prompt_len + 1)
        seconds, host = [], []
        for _ in range(self._repeats + 1):
            prompts = self._prompts(1, prompt_len)
            start, host_before, steps = time.perf_counter(), engine.stats.host_s, engine.stats.steps
            replies = self._ask(engine, prompts, 1)
            while engine.unfinished:
                self._step(engine, replies)
            seconds.append(time.perf_counter() - start)
            host.append(engine.stats.host_s - host_before)
            n_steps = engine.stats.steps - steps
            self._advance()
        cost = step_cost(
            self._model.config, self._model.params, [prompt_len / 2], rows=prompt_len / n_steps
        )
        return Measurement(
            name="prefill",
            batch=1,
            context=prompt_len,
            tokens=prompt_len,
            n_steps=n_steps,
            seconds=tuple(seconds[1:]),
            host_s=tuple(host[1:]),
            cost=cost,
            compile_s=engine.compile_s,
        )

    def decode(self, batch: int, prompt_len: int, gen_len: int) -> Measurement:
        """Time of the steps in which all of `batch` sequences decode, and nothing else.

        From the first token of the sequence that starts last to the end of the first that ends,
        which `gen_len` tokens are counted from.
        """
        # Prompts of the others are read while the first decode.
        step_tokens = max(self._step_tokens, 2 * batch)
        ahead = -(-batch * prompt_len // (step_tokens - batch)) - 1
        total = gen_len + ahead * self._decode_steps
        engine = self._engine(batch, prompt_len + total)
        seconds, host, tokens, n_steps = [], [], 0, 0
        for _ in range(self._repeats + 1):
            elapsed, spent, tokens, n_steps = self._decode_run(engine, batch, prompt_len, total)
            seconds.append(elapsed)
            host.append(spent)
            self._advance()
        contexts = [prompt_len + gen_len / 2] * batch
        return Measurement(
            name="decode",
            batch=batch,
            context=prompt_len + total,
            tokens=tokens,
            n_steps=n_steps,
            seconds=tuple(seconds[1:]),
            host_s=tuple(host[1:]),
            cost=step_cost(self._model.config, self._model.params, contexts),
            compile_s=engine.compile_s,
        )

    def _decode_run(
        self, engine: Engine, batch: int, prompt_len: int, total: int
    ) -> tuple[float, float, int, int]:
        """Seconds, Python's seconds, tokens and steps of the stretch that counts."""
        replies = self._ask(engine, self._prompts(batch, prompt_len), total)
        while not all(reply.ids for reply in replies):
            self._step(engine, replies)
        before = sum(len(reply.ids) for reply in replies)
        start, host = time.perf_counter(), engine.stats.host_s
        now = start
        while not any(reply.done for reply in replies):
            self._step(engine, replies)
            now = time.perf_counter()
        tokens = sum(len(reply.ids) for reply in replies) - before
        spent = engine.stats.host_s - host
        while engine.unfinished:
            engine.step()
        return now - start, spent, tokens, tokens // batch

    def _step(self, engine: Engine, replies: list[Reply]) -> None:
        engine.step()
        for reply in replies:
            if reply.error:
                raise StokerError(reply.error)

    def _engine(self, slots: int, context: int) -> Engine:
        limit = self._model.config.max_positions
        if context > limit:
            raise StokerError(f"sequences of {context} tokens: this model takes at most {limit}")
        return Engine(
            self._model,
            slots=slots,
            context=context,
            pages=slots * pages_for(context, page_tokens(self._model.config.kernels)),
            step_tokens=max(self._step_tokens, 2 * slots),
            prefix_cache=False,
            decode_steps=self._decode_steps,
        )

    def _ask(self, engine: Engine, prompts: list[list[int]], count: int) -> list[Reply]:
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        return [engine.add(prompt, params) for prompt in prompts]

    def _prompts(self, batch: int, length: int) -> list[list[int]]:
        return self._rng.integers(0, self._model.config.vocab_size, (batch, length)).tolist()
