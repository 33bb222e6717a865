"""Which implementation does an operation, and why: `dispatch` asks here, and so may people."""

from __future__ import annotations

import dataclasses
import importlib
from collections import Counter
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import jax

from ..config import Kernels, ModelConfig
from ..quantized import QuantArray
from .rounded import LEAST_ROWS, why_widened

#: Widest head that the GPU kernel takes: its keys and values must fit the shared memory.
GPU_HEAD = 256
#: Bytes of a pool of one-byte pages that Triton's 32-bit offsets reach.
_GPU_POOL = 2**31
_REFERENCE = "the reference was asked for"


@dataclasses.dataclass(frozen=True)
class Choice:
    """Who does an operation.

    Attributes:
      implementation: a folder of `models/ops`: "xla", "cpu", "tpu" or "gpu".
      why: the reason, where it is not the kernels that were asked for; or what they are.
      integer_rows: of a product, the rows (of a group, on average) from which activations are
        rounded to int8 and multiplied as integers; 0: never.
    """

    implementation: str
    why: str
    integer_rows: int = 0

    def integers(self, rows: int) -> bool:
        """Whether a product of so many rows is one of integers."""
        return 0 < self.integer_rows <= rows


def implementation(name: str) -> ModuleType:
    """The package of the Pallas kernels "tpu" or "gpu", which only their platform needs to load."""
    return importlib.import_module(f".{name}", __package__)


def product_choice(kernels: Kernels, weight: Any) -> Choice:
    """Who multiplies with `weight [R, C]`."""
    if kernels.platform in ("xla", "cpu"):
        return _plain(kernels)
    if not isinstance(weight, QuantArray):
        return Choice("xla", "weights are dense, and XLA's own products serve these")
    reason = implementation(kernels.platform).why_unsupported(weight)
    if reason:
        return Choice("xla", f"{reason}; the dense weights are written to memory first")
    return _kernel_choice(kernels, weight, "codes are widened inside the kernel")


def grouped_choice(kernels: Kernels, weight: Any) -> Choice:
    """Who multiplies rows with their group's matrix of `weight [E, R, C]`."""
    if kernels.platform in ("xla", "cpu"):
        return _plain(kernels)
    module = implementation(kernels.platform)
    if isinstance(weight, QuantArray) or kernels.platform == "gpu":
        reason = module.why_unsupported(weight)
        if reason:
            return Choice("xla", f"{reason}; all dense matrices are written to memory first")
    return _kernel_choice(kernels, weight, "matrices of groups without rows are not read")


def _kernel_choice(kernels: Kernels, weight: Any, why: str) -> Choice:
    """A TPU's or GPU's own product: of integers, where these were asked for and are faster."""
    if kernels.activations != "int8" or not isinstance(weight, QuantArray):
        return Choice(kernels.platform, why)
    reason = why_widened(weight)
    if reason:
        return Choice(kernels.platform, f"{why}; floats are faster than integers for {reason}")
    integers = f"from {LEAST_ROWS} rows on, activations are rounded to int8"
    return Choice(kernels.platform, f"{why}; {integers}", LEAST_ROWS)


def attention_choice(kernels: Kernels, head_dim: int, pool: jax.Array | None = None) -> Choice:
    """Who attends with heads of width H to pages, of which `pool` is one array (None: any)."""
    if kernels.platform in ("xla", "cpu"):
        return _plain(kernels)
    if kernels.platform == "gpu":
        if head_dim > GPU_HEAD:
            return Choice("xla", f"heads of width {head_dim} are wider than {GPU_HEAD}")
        if pool is not None and pool.dtype.itemsize == 1 and pool.size > _GPU_POOL:
            return Choice("xla", f"a pool of {pool.size:,} bytes is more than offsets reach")
    return Choice(kernels.platform, "a kernel over ragged pages")


def choices(config: ModelConfig, weights: Iterable[Any] = ()) -> dict[str, Choice]:
    """Who does each operation of a model, and why.

    Args:
      config: of the model.
      weights: its parameters (leaves that are quantised or packed arrays count as one), or any part
        of them; without them, products are those of dense weights.

    Returns:
      By operation: "products" and "grouped products" (where implementations differ between weights,
      the reason tells how many each has), "attention" and "sampling".
    """
    kernels = config.kernels
    matrices = [weight for weight in weights if weight.ndim > 1]
    products = [product_choice(kernels, weight) for weight in matrices if weight.ndim == 2]
    grouped = [grouped_choice(kernels, weight) for weight in matrices if weight.ndim == 3]
    found = {"products": _joined(products or [product_choice(kernels, None)])}
    if grouped:
        found["grouped products"] = _joined(grouped)
    if config.split.axes("context"):
        found["attention"] = Choice("xla", "devices share the context, whose parts are joined")
    elif config.latent is not None and kernels.platform in ("tpu", "gpu"):
        found["attention"] = Choice("xla", "latent attention has no kernel of its own so far")
    else:
        found["attention"] = attention_choice(kernels, config.head_dim)
    if kernels.platform in ("tpu", "gpu"):
        found["sampling"] = Choice("xla", "XLA's sort and reductions serve")
    else:
        found["sampling"] = _plain(kernels)
    return found


def _plain(kernels: Kernels) -> Choice:
    why = _REFERENCE if kernels.platform == "xla" else "a compiled kernel"
    return Choice(kernels.platform, why)


def _joined(found: list[Choice]) -> Choice:
    """One choice that speaks for all."""
    counts = Counter(found)
    if len(counts) == 1:
        return found[0]
    names = sorted({choice.implementation for choice in counts})
    parts = (f"{n} by {choice.implementation}: {choice.why}" for choice, n in counts.most_common())
    return Choice(" and ".join(names), "; ".join(parts))
