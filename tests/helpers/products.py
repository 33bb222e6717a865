"""Products of both kinds of Pallas kernels, against float64."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import interpreted
import jax
import jax.numpy as jnp
import numpy as np
from quantised import random_quant

from stoker.models.quantized import QuantArray, dequantize

#: Largest error, relative to the largest result: float32 sums in some order; and for bfloat16
#: operands the rounding of weights, 2**-9 each, which the reference makes as well.
FLOAT32, BFLOAT16 = 2e-6, 1e-5


def device(array: QuantArray) -> QuantArray:
    """`array` with JAX's arrays."""
    return jax.tree.map(jnp.asarray, array)


def activations(rows: int, columns: int, dtype: str = "float32") -> jax.Array:
    """Random `[rows, columns]`."""
    rng = np.random.default_rng(rows)
    return jnp.asarray(rng.normal(size=(rows, columns)), dtype)


def experts(name: str, count: int, rows: int) -> QuantArray:
    """Random matrices `[count, rows, C]` of a format."""
    each = [device(random_quant(name, rows, seed)) for seed in range(count)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)


def check(ops: ModuleType, x: jax.Array, weight: QuantArray, tolerance: float) -> None:
    """Raises AssertionError unless `ops.matmul` is x times the weight, rounded to x's type."""
    matmul = functools.partial(ops.matmul, interpret=True)
    result = np.asarray(interpreted.run(matmul, x, weight), np.float64)
    assert result.shape == (x.shape[0], weight.shape[0])
    wide = np.asarray(dequantize(weight, x.dtype), np.float64)
    _close(result, np.asarray(x, np.float64) @ wide.T, tolerance)


def check_integers(ops: ModuleType, x: jax.Array, weight: QuantArray) -> None:
    """Raises AssertionError unless `ops.integer_matmul` is x, rounded, times the weight.

    Nearly that, and within half a step of each element of what x itself would give.
    """
    matmul = functools.partial(ops.integer_matmul, interpret=True)
    result = np.asarray(interpreted.run(matmul, x, weight), np.float64)
    wide = np.asarray(dequantize(weight), np.float64)
    seen, step = as_integers(np.asarray(x), weight)
    _close(result, seen @ wide.T, 4e-6)
    slack = 0.5 * step @ np.abs(wide).T + 1e-5
    assert np.all(np.abs(result - np.asarray(x, np.float64) @ wide.T) <= slack)


def as_integers(x: np.ndarray, weight: QuantArray) -> tuple[np.ndarray, np.ndarray]:
    """What `x [T, C]` is once rounded for `weight`, and the steps it is rounded to, float64.

    The columns of a byte belong to one block of 128, which where groups are longer and codes have 4
    bits are not next to each other.
    """
    C, block = x.shape[1], np.gcd(weight.group, 128)
    column = np.arange(C)
    number = column // block
    if weight.bits == 4:
        half = weight.group // 2
        number = column // weight.group * (weight.group // block)
        number += column % weight.group % half // (block // 2)
    seen, step = np.zeros(x.shape), np.zeros(x.shape)
    for one in range(C // block):
        own = number == one
        largest = np.abs(x[:, own]).max(axis=1, keepdims=True).astype(np.float32)
        codes = np.rint(x[:, own] * (np.float32(127) / largest))
        step[:, own] = largest.astype(np.float64) / 127
        seen[:, own] = codes * step[:, own]
    return seen, step


def check_grouped(
    ops: ModuleType, x: jax.Array, weight: Any, sizes: list[int], integers: bool = False
) -> None:
    """Raises AssertionError unless each group's rows, as they are or rounded, met its matrix."""
    kernel = ops.integer_grouped_matmul if integers else ops.grouped_matmul
    grouped = functools.partial(kernel, interpret=True)
    result = interpreted.run(grouped, x, weight, jnp.asarray(sizes, jnp.int32))
    wide = dequantize(weight, x.dtype) if isinstance(weight, QuantArray) else weight
    wide, rows = np.asarray(wide, np.float64), np.asarray(x, np.float64)
    rows = as_integers(rows, weight)[0] if integers else rows
    group = np.repeat(np.arange(len(sizes)), sizes)
    _close(np.asarray(result, np.float64), np.einsum("tc,trc->tr", rows, wide[group]), FLOAT32)


def _close(result: np.ndarray, wanted: np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(result, wanted, rtol=0, atol=tolerance * np.abs(wanted).max())
