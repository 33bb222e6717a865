"""The compile contract: every step is compiled ahead of time, counted, and checked for donation."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from ..models.config import ModelConfig
from ..models.parameters import Params
from . import steps
from .cache import Cache
from .steps import DecodeBatch, Outputs, PrefillBatch, Scores, State

#: A function of `engine/steps.py` that takes `(params, cache, state, batch, ...)`.
Step = Callable[..., Any]
_LOG = logging.getLogger("stoker")


@dataclasses.dataclass(frozen=True)
class Compilation:
    """One compiled program.

    Attributes:
      step: name of the step.
      shape: rows, sequences, pages per sequence: T, B, M; and the steps at once, if several.
      seconds: that tracing and compiling took.
      aliased_bytes: inputs that outputs are written over.
      temporary_bytes: that a call allocates and frees again.
    """

    step: str
    shape: tuple[int, ...]
    seconds: float
    aliased_bytes: int | None
    temporary_bytes: int | None


class Programs:
    """The steps of one model, compiled for each shape they are called with.

    After `seal`, compiling anything further is logged as a warning with its shape and counted in
    `late`: a server that recompiles under load stalls every stream.

    Args:
      config: the architecture.
      top: alternatives that steps can report.
    """

    def __init__(self, config: ModelConfig, top: int = 0) -> None:
        self.config = config
        self.top = top
        self.compilations: list[Compilation] = []
        self.late = 0
        self._sealed = False
        self._programs: dict[tuple, jax.stages.Compiled] = {}

    def seal(self) -> None:
        """Declares warm-up finished."""
        self._sealed = True

    def prepare(self, step: Step, params: Params, cache: Cache, *rest: Any, **static: int) -> None:
        """Compiles `step` of `engine/steps.py` for these shapes, and runs nothing."""
        self._program(step, (params, cache, *rest), static)

    def prefill(
        self, params: Params, cache: Cache, state: State, batch: PrefillBatch
    ) -> tuple[Cache, State, Outputs]:
        """`steps.prefill`, compiled; `cache` and `state` are donated."""
        return self._run(steps.prefill, params, cache, state, batch)

    def decode(
        self, params: Params, cache: Cache, state: State, batch: DecodeBatch
    ) -> tuple[Cache, State, Outputs]:
        """`steps.decode`, compiled; `cache` and `state` are donated."""
        return self._run(steps.decode, params, cache, state, batch)

    def decode_steps(
        self, params: Params, cache: Cache, state: State, batch: DecodeBatch, count: int
    ) -> tuple[Cache, State, Outputs]:
        """`steps.decode_steps`, compiled; `cache` and `state` are donated."""
        return self._run(steps.decode_steps, params, cache, state, batch, steps=count)

    def score(
        self, params: Params, cache: Cache, state: State, batch: PrefillBatch, targets: jax.Array
    ) -> tuple[Cache, State, Scores]:
        """`steps.score`, compiled; `cache` and `state` are donated."""
        return self._run(steps.score, params, cache, state, batch, targets)

    def admit(self, state: State, slot: np.int32, row: State) -> State:
        """`steps.admit`, compiled; `state` is donated."""
        key = ("admit", state.history.shape)
        program = self._programs.get(key)
        if program is None:
            start = time.perf_counter()
            jitted = jax.jit(steps.admit, donate_argnums=0)
            program = self._programs[key] = jitted.lower(state, slot, row).compile()
            self._record("admit", state.history.shape, start, program)
        return program(state, slot, row)

    def _run(self, step: Step, *args: Any, **static: int) -> Any:
        return self._program(step, args, static)(*args)

    def _program(
        self, step: Step, args: tuple[Any, ...], static: Mapping[str, int]
    ) -> jax.stages.Compiled:
        _, cache, _, batch, *_ = args
        rows = batch.slots if isinstance(batch, DecodeBatch) else batch.tokens
        shape = (*rows.shape, *batch.page_table.shape, *static.values())
        key = (step.__name__, shape)
        program = self._programs.get(key)
        if program is None:
            start = time.perf_counter()
            bound = functools.partial(step, top=self.top, **static)
            program = compile_step(bound, self.config, *args)
            self._programs[key] = program
            record = self._record(*key, start, program)
            cache_bytes = sum(map(_device_bytes, jax.tree.leaves(cache)))
            # Some platforms do not say.
            if record.aliased_bytes is not None and record.aliased_bytes < cache_bytes:
                raise RuntimeError(
                    f"{record.step} {record.shape} writes {record.aliased_bytes} bytes in place, "
                    f"but the cache has {cache_bytes}: the compiler refused its donation"
                )
        return program

    def _record(
        self, step: str, shape: tuple[int, ...], start: float, program: jax.stages.Compiled
    ) -> Compilation:
        memory: Any = program.memory_analysis()
        record = Compilation(
            step=step,
            shape=shape,
            seconds=time.perf_counter() - start,
            aliased_bytes=memory.alias_size_in_bytes if memory else None,
            temporary_bytes=memory.temp_size_in_bytes if memory else None,
        )
        self.compilations.append(record)
        if self._sealed:
            self.late += 1
            _LOG.warning("compiled %s %s after warm-up", step, shape)
        return record


def _device_bytes(array: jax.Array) -> int:
    """Bytes that each device holds of an array."""
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def compile_step(step: Step, config: ModelConfig, *args: Any) -> jax.stages.Compiled:
    """`step` compiled for the shapes of `(params, cache, state, ...)`, donating cache and state."""
    placement = jax.tree.map(lambda pages: pages.sharding, args[1])
    devices = set().union(*(sharding.device_set for sharding in jax.tree.leaves(placement)))
    # A cache that is split must come out as it went in, or it cannot be written in place.
    split: dict[str, Any] = {"out_shardings": (placement, None, None)} if len(devices) > 1 else {}
    jitted = jax.jit(functools.partial(step, config=config), donate_argnums=(1, 2), **split)
    return jitted.lower(*args).compile()


def cache_copies(program: jax.stages.Compiled, cache: Cache) -> list[str]:
    """The instructions of a compiled step that copy a whole page buffer: none, if all is well."""
    names = {"float32": "f32", "bfloat16": "bf16"}
    pages = cache[0][0]
    kind = re.escape(f"{names[str(pages.dtype)]}[{','.join(map(str, pages.shape))}]")
    copy = re.compile(rf"= {kind}\S* copy(-start)?\(")
    return [line.strip() for line in (program.as_text() or "").splitlines() if copy.search(line)]
