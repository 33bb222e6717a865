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
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..models.config import ModelConfig
from ..models.parameters import Params
from . import steps
from .cache import Cache
from .on_mesh import admit_on_mesh, cache_specs, on_mesh, param_specs, results, slot_spec
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
      mesh: what steps run on, if not on one device.
    """

    def __init__(self, config: ModelConfig, top: int = 0, mesh: Mesh | None = None) -> None:
        self.config = config
        self.top = top
        self.mesh = mesh
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
            lowered = lower_admit(self.config, state, slot, row, self.mesh)
            program = self._programs[key] = lowered.compile()
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
            static = {"top": self.top, **static}
            program = compile_step(step, self.config, *args, mesh=self.mesh, **static)
            self._programs[key] = program
            record = self._record(*key, start, program)
            cache_bytes = device_bytes(cache)
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


def own_part(leaf: Any) -> jax.ShapeDtypeStruct:
    """What one device holds of an array, or of its shape."""
    return jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)


def device_bytes(tree: Any) -> int:
    """Bytes that one device holds of arrays, or of their shapes."""
    parts = map(own_part, jax.tree.leaves(tree))
    return sum(math.prod(part.shape) * part.dtype.itemsize for part in parts)


def compile_step(
    step: Step, config: ModelConfig, *args: Any, mesh: Mesh | None = None, **static: Any
) -> jax.stages.Compiled:
    """`step` compiled for the shapes of `(params, cache, state, ...)`, donating cache and state."""
    return lower_step(step, config, *args, mesh=mesh, **static).compile()


def lower_step(
    step: Step, config: ModelConfig, *args: Any, mesh: Mesh | None = None, **static: Any
) -> jax.stages.Lowered:
    """What `compile_step` compiles; arguments may be shapes."""
    if mesh is None:
        bound = functools.partial(step, config=config, **static)
        return jax.jit(bound, donate_argnums=(1, 2)).lower(*args)
    rows = slot_spec(config)
    specs = (param_specs(args[0], config), cache_specs(config), *(rows for _ in args[2:]))
    found = results(step, config)
    if len({device.process_index for device in mesh.devices.flat}) > 1:
        # What a step found is for the process that plans, wherever it was found.
        found = (*found[:2], *(PartitionSpec() for _ in found[2:]))
        args = jax.tree.map(_shape, args)
    jitted = jax.jit(
        on_mesh(step, config, mesh, **static),
        donate_argnums=(1, 2),
        in_shardings=_on(mesh, specs),
        out_shardings=_on(mesh, found),
    )
    return jitted.lower(*args)


def _shape(array: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array of the host: JAX compiles for no split ones, but runs with them."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def lower_admit(
    config: ModelConfig, state: State, slot: Any, row: State, mesh: Mesh | None = None
) -> jax.stages.Lowered:
    """`steps.admit`, donating `state`, to be compiled; arguments may be shapes."""
    return _admit(config, mesh).lower(state, slot, row)


def _admit(config: ModelConfig, mesh: Mesh | None) -> Any:
    """`steps.admit`, to be compiled."""
    if mesh is None:
        return jax.jit(steps.admit, donate_argnums=0)
    rows = _on(mesh, slot_spec(config))
    nowhere = _on(mesh, PartitionSpec())
    return jax.jit(
        admit_on_mesh(config, mesh),
        donate_argnums=0,
        in_shardings=(rows, nowhere, nowhere),
        out_shardings=rows,
    )


def _on(mesh: Mesh, specs: Any) -> Any:
    """The shardings of a tree of partitions."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda node: isinstance(node, PartitionSpec),
    )


def cache_copies(program: jax.stages.Compiled, cache: Cache) -> list[str]:
    """The instructions of a compiled step that copy a whole page buffer: none, if all is well."""
    names = {"float32": "f32", "bfloat16": "bf16", "int8": "s8", "float8_e4m3fn": "f8e4m3fn"}
    shapes = [(x.dtype, x.sharding.shard_shape(x.shape)) for x in cache[0]]
    kinds = (f"{names[str(dtype)]}[{','.join(map(str, shape))}]" for dtype, shape in shapes)
    copy = re.compile(rf"= ({'|'.join(map(re.escape, kinds))})\S* copy(-start)?\(")
    return [line.strip() for line in (program.as_text() or "").splitlines() if copy.search(line)]
