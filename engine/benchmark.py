"""Measures the steps that serve: prefill and decode at several batch sizes, against the floor."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ..models.config import ModelConfig
from ..models.parameters import Params
from .accounting import StepCost, step_cost
from .cache import PAGE_TOKENS, Cache, new_cache, pages_for
from .chunks import CHUNKS, chunk_batches
from .programs import Programs
from .sampling_params import SamplingParams
from .steps import DecodeBatch, State, new_state

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
      cost: what the average step must move and compute.
      compile_s: seconds to compile its programs.
    """

    name: str
    batch: int
    context: int
    tokens: int
    n_steps: int
    seconds: tuple[float, ...]
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
    def bytes_s(self) -> float:
        """Bytes per second that the steps must move."""
        return self.cost.bytes / self.step_s

    @property
    def operations_s(self) -> float:
        """Operations per second that the steps must compute."""
        return self.cost.operations / self.step_s


class Bench:
    """Runs a model's steps on random prompts, a new one for each sequence and run.

    Args:
      params: the model's parameters.
      config: its architecture.
      repeats: measured runs; one more goes before them to warm up.
      seed: of the prompts.
      chunks: rows that prefill chunks may have.
      advance: called after each run.
    """

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        *,
        repeats: int = 3,
        seed: int = 0,
        chunks: Sequence[int] = CHUNKS,
        advance: Advance = lambda: None,
    ) -> None:
        self._params = params
        self._config = config
        self._repeats = repeats
        self._chunks = tuple(chunks)
        self._rng = np.random.default_rng(seed)
        self._advance = advance

    def prefill(self, prompt_len: int) -> Measurement:
        """Time from a prompt to its first token on the host."""
        run = _Run(self._params, self._config, 1, prompt_len, self._chunks)
        seconds = []
        for repeat in range(self._repeats + 1):
            prompts = self._prompts(1, prompt_len)
            start = time.perf_counter()
            run.prefill(prompts)
            if repeat:
                seconds.append(time.perf_counter() - start)
            self._advance()
        n_steps = run.n_chunks
        return Measurement(
            name="prefill",
            batch=1,
            context=prompt_len,
            tokens=prompt_len,
            n_steps=n_steps,
            seconds=tuple(seconds),
            cost=step_cost(self._config, self._params, [prompt_len / 2], rows=prompt_len / n_steps),
            compile_s=run.compile_s,
        )

    def decode(self, batch: int, prompt_len: int, gen_len: int) -> Measurement:
        """Time of the steps that generate `gen_len` tokens, the first not counted.

        As when serving, a step is dispatched before the one before it is read.
        """
        run = _Run(self._params, self._config, batch, prompt_len + gen_len, self._chunks)
        seconds = []
        for repeat in range(self._repeats + 1):
            run.prefill(self._prompts(batch, prompt_len))
            elapsed = run.decode(gen_len - 1)
            if repeat:
                seconds.append(elapsed)
            self._advance()
        contexts = [prompt_len + gen_len / 2] * batch
        return Measurement(
            name="decode",
            batch=batch,
            context=prompt_len + gen_len,
            tokens=batch * (gen_len - 1),
            n_steps=gen_len - 1,
            seconds=tuple(seconds),
            cost=step_cost(self._config, self._params, contexts),
            compile_s=run.compile_s,
        )

    def _prompts(self, batch: int, length: int) -> list[list[int]]:
        return self._rng.integers(0, self._config.vocab_size, (batch, length)).tolist()


class _Run:
    """Compiled programs, cache and state for one batch size."""

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        batch: int,
        context: int,
        chunks: tuple[int, ...],
    ) -> None:
        self._params = params
        self._chunks = chunks
        self._programs = Programs(config)
        pages = pages_for(context, PAGE_TOKENS)
        self._cache: Cache = new_cache(config, batch * pages)
        table = jnp.arange(1, batch * pages + 1, dtype=jnp.int32)
        self._page_table = table.reshape(batch, pages)
        self._vocab_size = config.vocab_size
        self._requests = [SamplingParams()] * batch
        self._state: State = new_state(self._requests, config.vocab_size)
        self._decode = DecodeBatch(jnp.ones(batch, bool), self._page_table)
        self.n_chunks = 0

    @property
    def compile_s(self) -> float:
        return sum(program.seconds for program in self._programs.compilations)

    def prefill(self, prompts: list[list[int]]) -> None:
        """Fills the cache and waits for the first tokens."""
        state = new_state(self._requests, self._vocab_size)
        self.n_chunks = 0
        for chunk in chunk_batches(prompts, [0] * len(prompts), self._page_table, self._chunks):
            self._cache, state, outputs = self._programs.prefill(
                self._params, self._cache, state, chunk
            )
            self.n_chunks += 1
        jax.device_get(outputs)
        self._state = state

    def decode(self, count: int) -> float:
        """Seconds of `count` decode steps."""
        start = time.perf_counter()
        waiting = None
        for _ in range(count):
            self._cache, self._state, outputs = self._programs.decode(
                self._params, self._cache, self._state, self._decode
            )
            if waiting is not None:
                jax.device_get(waiting)
            waiting = outputs
        jax.device_get(waiting)
        return time.perf_counter() - start
