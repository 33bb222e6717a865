"""How fast this host's device copies, multiplies and decodes."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stoker.engine import steps
from stoker.engine.accounting import step_cost
from stoker.engine.cache import new_cache, page_bytes
from stoker.engine.compiling.contract import Setup, StepShape
from stoker.engine.pages import pages_for
from stoker.engine.programs import device_bytes
from stoker.engine.sampling_params import SamplingParams
from stoker.models import ops
from stoker.models.config import ACTIVATION_TYPES, Kernels
from stoker.models.pages import page_tokens
from stoker.models.quantized import QuantArray
from stoker.models.random_weights import architecture

#: Decode steps that the device takes at once, and calls that are timed after one to warm up.
_STEPS, _CALLS = 16, 3
#: Share of the device's memory that is used.
_SHARE = 0.9


@dataclasses.dataclass(frozen=True)
class Case:
    """What one program decodes: `layers` of an architecture (0: all), B sequences, some lengths."""

    architecture: str
    weights: str
    batch: int
    contexts: tuple[int, ...]
    layers: int = 0


@dataclasses.dataclass(frozen=True)
class Speed:
    """Seconds of a decode step, and of its floor: bytes and operations at the measured peaks.

    With a `problem` nothing was measured.
    """

    architecture: str
    weights: str
    batch: int
    context: int
    problem: str = ""
    step_s: float = 0.0
    floor_s: float = 0.0
    bytes: float = 0.0
    operations: float = 0.0
    compile_s: float = 0.0


def _seconds(run: Callable[[], Any], repeats: int = 5) -> float:
    """The shortest of several runs, after one to warm up."""
    jax.block_until_ready(run())
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        best = min(best, time.perf_counter() - start)
    return best


def copy_bandwidth(megabytes: int) -> float:
    """Bytes per second, read and written, of copying an array."""
    array = jnp.ones(megabytes * 2**18, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    return 2 * array.nbytes / _seconds(lambda: copy(array))


def product_peak(size: int) -> float:
    """Operations per second of a square bfloat16 product."""
    matrix = jnp.ones((size, size), jnp.bfloat16)
    product = jax.jit(lambda x: x @ x)
    return 2 * size**3 / _seconds(lambda: product(matrix))


def prefill_products(kernels: Kernels, size: int, rows: int = 512) -> dict[str, float]:
    """Operations per second of rows by square quantised matrices in groups of 128.

    By bits of a code and type of activations: what rounding these to int8 gains, if anything.
    """
    x, found = jnp.ones((rows, size), jnp.bfloat16), {}
    for bits in (4, 8):
        codes = jnp.ones((size, size * bits // 8), jnp.uint8 if bits == 4 else jnp.int8)
        scale = jnp.ones((size, size // 128), jnp.float32)
        weight = QuantArray(codes, scale, bits=bits, group=128)
        for activations in ACTIVATION_TYPES:
            product = jax.jit(
                functools.partial(
                    ops.matmul, kernels=dataclasses.replace(kernels, activations=activations)
                )
            )
            seconds = _seconds(functools.partial(product, x, weight))
            found[f"int{bits}, {activations}"] = 2 * rows * size**2 / seconds
    return found


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A case, and its program and the seconds to compile it, once they are there."""

    case: Case
    setup: Setup
    program: Future[tuple[jax.stages.Compiled, float]]


def prepare(cases: Sequence[Case], kernels: Kernels) -> list[Prepared]:
    """Begins to compile the programs of all cases, beside what else happens."""
    pool = ThreadPoolExecutor(6)
    setups = [_setup(case, kernels) for case in cases]
    return [
        Prepared(case, setup, pool.submit(_compile, setup))
        for case, setup in zip(cases, setups, strict=True)
    ]


def measure(
    prepared: Sequence[Prepared], bandwidth: float, peak: float, deadline: float
) -> Iterator[Speed]:
    """Measures one case after another until `deadline` of `time.monotonic`."""
    kind, params = None, None
    for one in prepared:
        case, left = one.case, deadline - time.monotonic()
        try:
            if left < 10:
                raise TimeoutError
            program, seconds = one.program.result(timeout=left - 5)
            if kind != (case.architecture, case.weights):
                kind, params = (case.architecture, case.weights), None  # not both at once
                params = _random_params(one.setup)
            yield from _measure(case, one.setup, program, params, bandwidth, peak, seconds)
        except TimeoutError:
            one.program.cancel()
            yield from (_problem(case, context, "no time left") for context in case.contexts)
        except Exception as error:  # one failure must not cost the rest of the lease
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            yield from (_problem(case, context, text) for context in case.contexts)


def _problem(case: Case, context: int, text: str) -> Speed:
    return Speed(case.architecture, case.weights, case.batch, context, text)


def _free_memory() -> float:
    """Bytes that the device may use; a fixed few where it does not say."""
    memory = jax.devices()[0].memory_stats() or {}
    return _SHARE * memory.get("bytes_limit", 8e9)


def _setup(case: Case, kernels: Kernels) -> Setup:
    config = architecture(case.architecture)
    layers = case.layers or config.n_layers
    config = dataclasses.replace(
        config,
        n_layers=layers,
        kinds=config.kinds[:layers],
        dtype="bfloat16",
        kv_dtype="bfloat16",
        kernels=kernels,
    )
    context = max(case.contexts)
    one = Setup(config, case.weights, jax.devices(), None, case.batch, context, pages=1)
    room = int((_free_memory() - device_bytes(one.params())) / page_bytes(config))
    wanted = case.batch * pages_for(context, page_tokens(kernels))
    return dataclasses.replace(one, pages=max(min(wanted, room), 1))


def _compile(setup: Setup) -> tuple[jax.stages.Compiled, float]:
    start = time.perf_counter()
    shape = StepShape("decode_steps", setup.slots, setup.slots, _STEPS)
    return setup.lower(shape).compile(), time.perf_counter() - start


def _random_params(setup: Setup) -> Any:
    """Random codes and values, made on the device; scales are small and alike."""

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def fill(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
        kind = jnp.dtype(dtype)
        if kind in (jnp.uint8, jnp.int8):
            return jax.lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint8), kind)
        if kind == jnp.int16:  # float16, as TPUs load it
            return jax.lax.bitcast_convert_type(jnp.full(shape, 1e-3, jnp.float16), jnp.int16)
        if len(shape) < 2 or kind not in (jnp.bfloat16, jnp.float32):
            return jnp.full(shape, 1e-3, kind)
        return jax.random.normal(key, shape, kind) * 0.02

    leaves, structure = jax.tree.flatten(setup.params())
    keys = jax.random.split(jax.random.key(0), len(leaves))
    made = [fill(key, leaf.shape, str(leaf.dtype)) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.block_until_ready(jax.tree.unflatten(structure, made))


def _measure(
    case: Case,
    setup: Setup,
    program: jax.stages.Compiled,
    params: Any,
    bandwidth: float,
    peak: float,
    compile_s: float,
) -> list[Speed]:
    config, found = setup.config, []
    tokens = _STEPS * (_CALLS + 1)
    for context in case.contexts:
        first = context - tokens
        each = pages_for(context, setup.page_tokens)
        if first < 1 or case.batch * each > setup.pages:
            found.append(_problem(case, context, "does not fit"))
            continue
        width = pages_for(setup.context, setup.page_tokens)
        table = np.zeros((case.batch, width), np.int32)
        table[:, :each] = 1 + np.arange(case.batch * each).reshape(case.batch, each)
        batch = steps.DecodeBatch(
            table, np.arange(case.batch, dtype=np.int32), np.full(case.batch, context, np.int32)
        )
        requests = [SamplingParams(seed=0)] * case.batch
        state = steps.new_state(requests, config.vocab_size, setup.context)
        state = dataclasses.replace(state, lengths=jnp.full(case.batch, first, jnp.int32))
        cache, times = new_cache(config, setup.pages), []
        for _ in range(_CALLS + 1):
            start = time.perf_counter()
            cache, state, outputs = program(params, cache, state, batch)
            jax.block_until_ready(outputs)
            times.append((time.perf_counter() - start) / _STEPS)
        del cache
        lengths = [context - tokens / 2] * case.batch
        cost = step_cost(config, setup.params(), lengths)
        found.append(
            Speed(
                case.architecture,
                case.weights,
                case.batch,
                context,
                step_s=statistics.median(times[1:]),
                floor_s=max(cost.bytes / bandwidth, cost.operations / peak),
                bytes=cost.bytes,
                operations=cost.operations,
                compile_s=compile_s,
            )
        )
    return found
