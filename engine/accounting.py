"""Which bytes a step must move, and how fast this hardware moves bytes."""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from ..models.config import Kernels, ModelConfig
from ..models.host_threads import usable_cores
from ..models.ops import cpu
from ..models.pages import layer_token_bytes
from ..models.parameters import Params, count_bytes, count_elements
from .cache import token_bytes

#: Peak memory bandwidth by JAX device kind, bytes/s, from the makers' data sheets.
DEVICE_BANDWIDTH = {
    "NVIDIA A100-SXM4-80GB": 2.039e12,
    "NVIDIA H100 80GB HBM3": 3.35e12,
    "NVIDIA H200": 4.8e12,
    "TPU v4": 1.228e12,
    "TPU v5 lite": 0.819e12,
    "TPU v5p": 2.765e12,
    "TPU v6 lite": 1.64e12,
}


#: Peak of dense bfloat16 products by JAX device kind, operations/s, likewise.
DEVICE_OPERATIONS = {
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
}


#: How the parameters begin that only the rows of one expert meet.
_EXPERT = "expert_"


@dataclasses.dataclass(frozen=True)
class StepCost:
    """What one step must move and compute.

    Attributes:
      weights: bytes of weights, each read once; of the embedding table only the rows looked up,
        unless it is the head too, and of experts only those that some row goes to.
      kv_read: bytes of what is cached of the tokens that rows attend to.
      kv_write: bytes that the new tokens take in the cache.
      logits: bytes of logits written.
      operations: multiplications and additions of all products.
    """

    weights: float
    kv_read: float
    kv_write: float
    logits: float
    operations: float

    @property
    def bytes(self) -> float:
        """All bytes."""
        return self.weights + self.kv_read + self.kv_write + self.logits


@dataclasses.dataclass(frozen=True)
class WeightBytes:
    """Which bytes of a model's weights a step reads.

    Attributes:
      always: in every step.
      row: of the embedding table, looked up for each row.
      experts: of all experts of all layers.
      n_experts: E; 0 without experts.
      per_row: experts that a row goes to.
    """

    always: float
    row: float
    experts: float
    n_experts: int
    per_row: int

    def read(self, rows: float) -> float:
        """Bytes that a step of so many rows must read."""
        share = 0.0
        if self.n_experts:
            share = experts_touched(self.n_experts, self.per_row, rows) / self.n_experts
        return self.always + rows * self.row + share * self.experts


def weight_bytes(config: ModelConfig, params: Params) -> WeightBytes:
    """The bytes of weights (or of their shapes) by when they are read."""
    table = count_bytes(params["embedding"])
    experts = count_bytes(_experts(params))
    return WeightBytes(
        always=count_bytes(params) - experts - (0 if config.tied_head else table),
        row=table / config.vocab_size,
        experts=experts,
        n_experts=config.n_experts,
        per_row=config.experts_per_token,
    )


def experts_touched(n_experts: int, per_row: int, rows: float) -> float:
    """How many of E experts are expected to meet at least one of T rows: E (1 - (1 - k/E)^T).

    As if each row chose k experts evenly and on its own. Real texts choose less evenly, so that a
    step touches fewer; what is predicted is the most that balanced routing would read.
    """
    return n_experts * (1 - (1 - per_row / n_experts) ** rows)


class CacheReads:
    """What rows of one model read of the cache.

    Args:
      config: the architecture.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._layers = Counter(kind.window for kind in config.layer_kinds)
        self._bytes = layer_token_bytes(config)

    def tokens(self, context: float, rows: float = 1) -> float:
        """Cached tokens that a sequence's rows attend to, summed over layers.

        The last of `rows` neighbours sees `context` tokens, or the window that ends with it; the
        windows of all of them together are `rows - 1` longer.
        """
        return sum(
            count * (min(context, window + rows - 1) if window else context)
            for window, count in self._layers.items()
        )

    def read(self, context: float, rows: float = 1) -> float:
        """The same in bytes, each read once."""
        return self.tokens(context, rows) * self._bytes


def step_cost(
    config: ModelConfig, params: Params, contexts: Sequence[float], rows: float | None = None
) -> StepCost:
    """The cost of a step over sequences whose caches hold `contexts` tokens after it.

    Args:
      config: the architecture.
      params: weights, or their shapes.
      contexts: tokens attended to by each sequence (an average may be fractional).
      rows: tokens computed in all, by each sequence as many; one for each if None.
    """
    rows = len(contexts) if rows is None else rows
    each = rows / len(contexts)
    reads = CacheReads(config)
    experts = count_elements(_experts(params))
    idle = experts * (1 - config.experts_per_token / config.n_experts) if config.n_experts else 0
    table = 0 if config.tied_head else params["embedding"].size
    head = config.vocab_size * config.d_model
    elements = count_elements(params) - table - idle
    if config.latent is None:
        width = 2 * config.head_dim
    else:
        width = config.latent.width + config.latent.kv_rank
    attended = each * sum(reads.tokens(context) for context in contexts)
    return StepCost(
        weights=weight_bytes(config, params).read(rows),
        kv_read=sum(reads.read(context, each) for context in contexts),
        kv_write=rows * token_bytes(config),
        logits=4 * len(contexts) * config.vocab_size,
        operations=2 * (elements - head) * rows
        + 2 * head * len(contexts)
        + 2 * config.n_heads * width * attended,
    )


def memory_bandwidth(megabytes: int = 256, repeats: int = 5) -> tuple[float, str]:
    """Bytes per second that this device reads, and how that is known.

    Accelerators are looked up by device kind. On a CPU every core reduces its share of an array
    larger than the caches, and the best of `repeats` counts: about a quarter of a second. Where
    neither is possible the figure is 0.
    """
    device = jax.devices()[0]
    if device.platform != "cpu":
        return DEVICE_BANDWIDTH.get(device.device_kind, 0.0), device.device_kind
    threads = usable_cores()
    array = np.ones(megabytes * 2**20 // 8, np.int64)
    shares = np.array_split(array, threads)
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            start = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, shares))
            best = min(best, time.perf_counter() - start)
    return array.nbytes / best, f"measured with {threads} threads"


def arithmetic_peak(kernels: Kernels) -> tuple[float, str]:
    """Operations per second that this device computes, and how that is known.

    Accelerators are looked up by device kind, for bfloat16. On a CPU every core multiplies
    registers, of bytes or floats as `kernels` do: some hundredths of a second. Where neither is
    possible the figure is 0.
    """
    device = jax.devices()[0]
    if device.platform != "cpu":
        return DEVICE_OPERATIONS.get(device.device_kind, 0.0), device.device_kind
    library = cpu.load()
    if library is None:
        return 0.0, "not measured without the CPU kernels"
    threads = usable_cores()
    peak = cpu.peak_operations(library, kernels.activations, threads)
    return peak, f"{kernels.activations}, measured with {threads} threads"


def peak_memory() -> int:
    """Bytes of the largest resident size so far; on accelerators, of the device's allocations."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    if sys.platform == "win32":
        return 0
    if sys.platform == "linux":
        # getrusage would start from the parent's peak: Linux keeps it through fork and exec.
        found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
        if found:
            return int(found[1]) * 1024
    import resource

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def _experts(params: Params) -> list[dict[str, jax.Array]]:
    """Of each layer, what belongs to its experts."""
    return [
        {name: leaf for name, leaf in layer.items() if name.startswith(_EXPERT)}
        for layer in params["layers"]
    ]
