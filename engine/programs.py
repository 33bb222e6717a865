"""The compile contract: every step is compiled ahead of time, counted, and checked for donation."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import re
import time
from collections.abc import Callable
from typing import Any

import jax

from ..models.config import ModelConfig
from ..models.parameters import Params
from . import steps
from .cache import Cache
from .steps import DecodeBatch, Outputs, PrefillBatch, State

_LOG = logging.getLogger("stoker")


@dataclasses.dataclass(frozen=True)
class Compilation:
    """One compiled program.

    Attributes:
      step: name of the step.
      shape: tokens, slots and pages per slot: T, S, M.
      seconds: that tracing and compiling took.
      aliased_bytes: inputs that outputs are written over.
      temporary_bytes: that a call allocates and frees again.
    """

    step: str
    shape: tuple[int, int, int]
    seconds: float
    aliased_bytes: int
    temporary_bytes: int


class Programs:
    """The steps of one model, compiled for each shape they are called with.

    After `seal`, compiling anything further is logged as a warning with its shape and counted in
    `late`: a server that recompiles under load stalls every stream.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.compilations: list[Compilation] = []
        self.late = 0
        self._sealed = False
        self._programs: dict[tuple[str, tuple[int, int, int]], jax.stages.Compiled] = {}

    def seal(self) -> None:
        """Declares warm-up finished."""
        self._sealed = True

    def prepare(self, step: Callable[..., Any], params: Params, cache: Cache, *rest: Any) -> None:
        """Compiles `step` of `engine/steps.py` for these shapes, and runs nothing."""
        self._program(step, params, cache, *rest)

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

    def score(
        self, params: Params, cache: Cache, state: State, batch: PrefillBatch, targets: jax.Array
    ) -> tuple[Cache, State, jax.Array]:
        """`steps.score`, compiled; `cache` and `state` are donated."""
        return self._run(steps.score, params, cache, state, batch, targets)

    def _run(self, step: Callable[..., Any], *args: Any) -> Any:
        return self._program(step, *args)(*args)

    def _program(
        self, step: Callable[..., Any], params: Params, cache: Cache, *rest: Any
    ) -> jax.stages.Compiled:
        batch = rest[1]
        rows = batch.active if isinstance(batch, DecodeBatch) else batch.tokens
        key = (step.__name__, (*rows.shape, *batch.page_table.shape))
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._compile(key, step, params, cache, *rest)
        return program

    def _compile(self, key: tuple, step: Callable[..., Any], *args: Any) -> jax.stages.Compiled:
        start = time.perf_counter()
        program = compile_step(step, self.config, *args)
        memory: Any = program.memory_analysis()
        record = Compilation(
            step=key[0],
            shape=key[1],
            seconds=time.perf_counter() - start,
            # Some platforms do not say.
            aliased_bytes=memory.alias_size_in_bytes if memory else 0,
            temporary_bytes=memory.temp_size_in_bytes if memory else 0,
        )
        self.compilations.append(record)
        cache_bytes = sum(map(_device_bytes, jax.tree.leaves(args[1])))
        if memory and record.aliased_bytes < cache_bytes:
            raise RuntimeError(
                f"{record.step} {record.shape} writes {record.aliased_bytes} bytes in place, but "
                f"the cache has {cache_bytes}: the compiler refused its donation"
            )
        if self._sealed:
            self.late += 1
            _LOG.warning("compiled %s %s after warm-up", record.step, record.shape)
        return program


def _device_bytes(array: jax.Array) -> int:
    """Bytes that each device holds of an array."""
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def compile_step(step: Callable[..., Any], config: ModelConfig, *args: Any) -> jax.stages.Compiled:
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
    kinds = (f"{names[str(x.dtype)]}[{','.join(map(str, x.shape))}]" for x in cache[0])
    copy = re.compile(rf"= ({'|'.join(map(re.escape, kinds))})\S* copy(-start)?\(")
    return [line.strip() for line in (program.as_text() or "").splitlines() if copy.search(line)]
