"""What a compiled step holds and moves, by the compiler's word and by Stoker's own count."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import jax

from ...models.parameters import is_weight
from ...models.quantized import QuantArray
from ..accounting import StepCost, experts_touched
from ..programs import device_bytes, own_part
from .contract import Setup, StepShape
from .cost_model import Surplus, explain
from .hlo import Array, Computation, Instruction, Moved, Program, kernel_name
from .targets import Target

#: How XLA calls the types of pages.
_TYPES = {"float32": "f32", "bfloat16": "bf16", "int8": "s8", "float8_e4m3fn": "f8e4m3fn"}
_FLOATS = ("f32", "bf16", "f16")
_KV_KERNELS = ("stoker_attention", "stoker_latent_attention", "stoker_append")
_EXPERT_KERNELS = ("stoker_grouped_matmul", "stoker_integer_grouped_matmul")


@dataclasses.dataclass(frozen=True)
class StepReport:
    """One program of the contract on each device. Bytes are of one device.

    Attributes:
      step: which one, as `str(StepShape)`.
      seconds: that tracing and compiling took here.
      argument_bytes: weights, cache, state and batch, as the compiler lays them out.
      weight_bytes: of the weights alone, by their shapes; of `cache_bytes` likewise.
      cache_bytes: of the KV cache.
      temporary_bytes: that a call allocates and frees again.
      output_bytes: that it returns, aliased ones included.
      aliased_bytes: arguments that results are written over.
      code_bytes: of the program itself, where the platform keeps it in the device's memory.
      total_bytes: what the device must hold at once.
      fits: whether it has so much.
      cache_aliased: the results hold the donated cache where it lies.
      cache_copies: instructions that copy a whole array of pages, to wherever.
      dense_weights: instructions that write a quantised matrix out as floats.
      largest_temporary: bytes of the largest array that it makes in memory, but for pages.
      collectives: how often each kind occurs, all layers together.
      kernels: how often each is called; the compiler's own by its name for them.
      compiler_bytes: moved, by the compiler's cost model. None where it does not say.
      compiler_operations: likewise.
      program_bytes: moved in memory by the program's instructions (`hlo.Program.bytes`); pages as
        `counted` has them, experts as many as are expected to be touched.
      surplus: why the cost model says other bytes than that. None where it says none.
      counted: what must be moved and computed, by Stoker's count, with all contexts full.
    """

    step: str
    seconds: float
    argument_bytes: int
    weight_bytes: int
    cache_bytes: int
    temporary_bytes: int
    output_bytes: int
    aliased_bytes: int
    code_bytes: int
    total_bytes: int
    fits: bool
    cache_aliased: bool
    cache_copies: int
    dense_weights: int
    largest_temporary: int
    collectives: dict[str, int]
    kernels: dict[str, int]
    compiler_bytes: float | None
    compiler_operations: float | None
    program_bytes: float
    surplus: Surplus | None
    counted: StepCost

    def to_json(self) -> dict[str, Any]:
        """All fields, and the bytes counted in all."""
        return {**dataclasses.asdict(self), "counted_bytes": self.counted.bytes}


@dataclasses.dataclass(frozen=True)
class StepRefused:
    """A program that the compiler would not make, since memory does not hold what it needs.

    Attributes:
      step: which one.
      seconds: until it said so.
      problem: in its words.
    """

    step: str
    seconds: float
    problem: str

    def to_json(self) -> dict[str, Any]:
        """All fields, and that it does not fit."""
        return {**dataclasses.asdict(self), "fits": False}


def report_step(
    setup: Setup, shape: StepShape, target: Target, keep: Callable[[str], object] | None = None
) -> StepReport | StepRefused:
    """Compiles one program for the target's devices, and reads it; `keep` is given its text."""
    start = time.perf_counter()
    try:
        program = setup.lower(shape).compile()
    except RuntimeError as error:
        # XLA's own error for memory; it has no type of its own.
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        problem = " ".join(str(error).split())[:300]
        return StepRefused(str(shape), time.perf_counter() - start, problem)
    seconds = time.perf_counter() - start
    if keep is not None:
        keep(program.as_text() or "")
    return read_program(program, setup, shape, target, seconds)


def read_program(
    program: jax.stages.Compiled, setup: Setup, shape: StepShape, target: Target, seconds: float
) -> StepReport:
    """The report of a compiled program of `setup`."""
    memory: Any = program.memory_analysis()
    hlo = Program(program.as_text() or "")
    params, cache = setup.params(), setup.cache()
    cost = setup.cost(shape)
    admits = shape.step == "admit"
    cache_bytes = 0 if admits else device_bytes(cache)
    compiler_bytes, compiler_operations = _cost_model(program)
    total = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.generated_code_size_in_bytes
    )
    calls = _CustomCalls(setup, params, cache, shape.rows)
    pages = 0 if admits else _kv_bytes(hlo, cost)
    surplus = None
    if compiler_bytes is not None:
        surplus = explain(hlo, compiler_bytes, calls) + Surplus(kernels=-pages)
    return StepReport(
        step=str(shape),
        seconds=seconds,
        argument_bytes=memory.argument_size_in_bytes,
        weight_bytes=0 if admits else device_bytes(params),
        cache_bytes=cache_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        total_bytes=total,
        fits=total <= target.memory_bytes,
        cache_aliased=memory.alias_size_in_bytes >= cache_bytes,
        cache_copies=_cache_copies(hlo, cache),
        dense_weights=_dense_weights(hlo, params),
        largest_temporary=_largest_temporary(hlo, cache),
        collectives=hlo.collectives(),
        kernels=hlo.kernels(),
        compiler_bytes=compiler_bytes,
        compiler_operations=compiler_operations,
        program_bytes=hlo.bytes(calls) + pages,
        surplus=surplus,
        counted=cost,
    )


class _CustomCalls:
    """What kernels move, whose operands say more than they read: pages and experts.

    Pages count as nothing here, since the count of live tokens takes their place, and experts as
    far as rows are expected to meet them.
    """

    def __init__(self, setup: Setup, params: Any, cache: Any, rows: int) -> None:
        config = setup.config
        self._pages = {_bytes_of(leaf) for leaf in jax.tree.leaves(cache)}
        self._experts = {
            _bytes_of(leaf)
            for layer in params["layers"]
            for name, weight in layer.items()
            if name.startswith("expert_")
            for leaf in jax.tree.leaves(weight)
        }
        self._share = 1.0
        if config.n_experts:
            touched = experts_touched(config.n_experts, config.experts_per_token, rows)
            self._share = touched / config.n_experts

    def __call__(self, one: Instruction, operands: list[Array]) -> Moved | None:
        name = kernel_name(one) or ""
        if name in _KV_KERNELS:
            return Moved(self._but_pages(operands), self._but_pages(one.results))
        if name in _EXPERT_KERNELS:
            read = sum(self._touched(array) for array in operands if not array.local)
            return Moved(read, sum(array.nbytes for array in one.results if not array.local))
        return None

    def _but_pages(self, arrays: Any) -> float:
        plain = (array for array in arrays if array.nbytes not in self._pages)
        return sum(array.nbytes for array in plain if not array.local)

    def _touched(self, array: Array) -> float:
        return array.nbytes * (self._share if array.nbytes in self._experts else 1)


def _kv_bytes(hlo: Program, cost: StepCost) -> float:
    """The pages' bytes, where kernels read them and not the program's own instructions."""
    kernels = hlo.kernels()
    return cost.kv_read + cost.kv_write if any(name in kernels for name in _KV_KERNELS) else 0


def _bytes_of(leaf: Any) -> int:
    part = own_part(leaf)
    return math.prod(part.shape) * part.dtype.itemsize


def _kinds(cache: Any) -> set[tuple[str | None, tuple[int, ...]]]:
    """Types and shapes of one device's pages, as a program says them."""
    parts = map(own_part, jax.tree.leaves(cache))
    return {(_TYPES.get(str(part.dtype)), part.shape) for part in parts}


def _cache_copies(hlo: Program, cache: Any) -> int:
    kinds = _kinds(cache)
    copies = (one for one in hlo.executed() if one.op in ("copy", "copy-start"))
    return sum((one.results[0].dtype, one.results[0].shape) in kinds for one in copies)


def _largest_temporary(hlo: Program, cache: Any) -> int:
    kinds = _kinds(cache)
    made = (array for one in hlo.executed() if one.makes for array in one.results)
    sizes = (x.nbytes for x in made if not x.local and (x.dtype, x.shape) not in kinds)
    return max(sizes, default=0)


def _dense_weights(hlo: Program, params: Any) -> int:
    """Arrays of floats that have the sizes of a quantised matrix, in some order, and come of one.

    What depends on anything else is no weight, but rows that happen to be as many.
    """
    sizes, stored = set(), set()
    for weight in jax.tree.leaves(params, is_leaf=is_weight):
        if isinstance(weight, QuantArray):
            stored |= {own_part(leaf).shape for leaf in jax.tree.leaves(weight)}
            *lead, groups = own_part(weight.scale).shape
            columns = groups * weight.group
            sizes |= {_sizes((*lead, columns))}
            sizes |= {_sizes((*lead, columns // weight.group, weight.group))}
    return sum(
        array.dtype in _FLOATS and _sizes(array.shape) in sizes
        for computation in hlo.run()
        for one in _made_of(computation, stored)
        for array in one.results
    )


def _made_of(computation: Computation, shapes: set[tuple[int, ...]]) -> list[Instruction]:
    """Instructions that depend on nothing but arguments of these shapes and constants."""
    known = {name for name, one in computation.items() if one.op in ("constant", "iota")}
    found = []
    for name, one in computation.items():
        given = one.op in ("parameter", "get-tuple-element")
        if given and any(array.shape in shapes for array in one.results[:1]):
            known.add(name)
        elif one.operands and known.issuperset(one.operands):
            known.add(name)
            found.append(one)
    return [one for one in found if one.makes]


def _sizes(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(size for size in shape if size > 1))


def _cost_model(program: jax.stages.Compiled) -> tuple[float | None, float | None]:
    """Bytes and operations by the compiler's cost model."""
    found: Any = program.cost_analysis() or _generic_cost(program)
    return found.get("bytes accessed"), found.get("flops")


def _generic_cost(program: jax.stages.Compiled) -> dict[str, float]:
    """XLA's cost model for no platform in particular, of the optimised program.

    The compiler for GPUs that are not there has no other, and JAX no public name for this one.
    """
    try:
        from jax._src.lib import xla_client

        executable: Any = program.runtime_executable()
        (module,) = executable.hlo_modules()
        client = jax.local_devices(backend="cpu")[0].client
        return dict(xla_client._xla.hlo_module_cost_analysis(client, module))
    except (ImportError, AttributeError, ValueError, RuntimeError):
        return {}
