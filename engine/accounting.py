"""Which bytes a step must move, and how fast this hardware moves bytes."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from ..models.config import Kernels, ModelConfig
from ..models.ops import cpu
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


@dataclasses.dataclass(frozen=True)
class StepCost:
    """What one step must move and compute, from shapes alone.

    Attributes:
      weights: bytes of weights, each read once; of the embedding table only the rows looked up,
        unless it is the head too; of experts only those that some row picks, on average.
      kv_read: bytes of live keys and values.
      kv_write: bytes of new keys and values.
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


def step_cost(
    config: ModelConfig, params: Params, contexts: Sequence[float], rows: float | None = None
) -> StepCost:
    """The cost of a step over sequences whose caches hold `contexts` tokens after it.

    Args:
      config: the architecture.
      params: weights, or their shapes: what counts is `nbytes`.
      contexts: tokens attended to by each sequence (an average may be fractional).
      rows: tokens computed in all; one for each sequence if None.
    """
    rows = len(contexts) if rows is None else rows
    table = params["embedding"]
    lookup = rows * table.nbytes / config.vocab_size
    experts = [
        leaf
        for layer in params["layers"]
        for name, leaf in layer.items()
        if name.startswith("expert_")
    ]
    picked = config.experts_per_token / max(config.n_experts, 1)
    idle = (1 - picked) ** rows  # where a router picks evenly
    matrices = count_bytes(params) - (0 if config.tied_head else table.nbytes)
    matrices -= idle * sum(leaf.nbytes for leaf in experts)
    elements = count_elements(params) - (0 if config.tied_head else table.size)
    elements -= (1 - picked) * sum(leaf.size for leaf in experts)
    head = config.vocab_size * config.d_model
    live = sum(contexts)
    attention = 4 * config.n_layers * config.n_heads * config.head_dim * live * rows / len(contexts)
    return StepCost(
        weights=matrices + lookup,
        kv_read=live * token_bytes(config),
        kv_write=rows * token_bytes(config),
        logits=4 * len(contexts) * config.vocab_size,
        operations=2 * (elements - head) * rows + 2 * head * len(contexts) + attention,
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


def usable_cores() -> int:
    """Cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


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
