"""Products of grouped rows by the compiled kernels, against each group's product alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantised import random_levels, random_quant

from stoker.models.config import ACTIVATION_TYPES, ACTIVATIONS
from stoker.models.errors import StokerError
from stoker.models.ops import cpu, xla
from stoker.models.ops.elementwise import gated
from stoker.models.quantized import dequantize

LIBRARY = cpu.load()
assert LIBRARY is not None, cpu.why_unavailable()
ISAS = LIBRARY.isas
#: Groups without rows, at both ends and within; of one row, of whole blocks, and of many.
SIZES = (0, 1, 4, 0, 21, 7, 0)
KINDS = ("q4_1", "q8_0", "q6_k", "mxfp4", "float32", "bfloat16")


def rows(*shape: int, seed: int = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def stack(kind: str, R: int = 37, groups: int = len(SIZES), seed: int = 0) -> tuple[Any, Any]:
    """Matrices `[E, R, C]` as the kernels read them, and what they stand for."""
    if kind in ("float32", "bfloat16"):
        dense = rows(groups, R, 100, seed=seed).astype(kind)
        return dense, dense.astype(jnp.float32)
    make = random_levels if kind == "mxfp4" else random_quant
    parts = [make(kind, R, seed=seed + group) for group in range(groups)]
    array = jax.tree.map(lambda *leaves: np.stack(leaves), *parts)
    return cpu.pack(array), dequantize(array)


def one(weight: Any, group: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[group], weight)


def groups_of(sizes: tuple[int, ...]) -> np.ndarray:
    return np.repeat(np.arange(len(sizes)), sizes)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activations", ACTIVATION_TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_get_what_their_matrix_alone_gives(kind: str, activations: str, isa: str) -> None:
    weight, values = stack(kind)
    sizes, x = jnp.asarray(SIZES, jnp.int32), rows(sum(SIZES), values.shape[-1])
    bias = rows(len(SIZES), 37, seed=4)
    options: dict[str, Any] = {"activations": activations, "isa": isa}
    (got,) = cpu.grouped_products(x, (weight,), sizes, **options)
    (added,) = cpu.grouped_products(x, (weight,), sizes, biases=(bias,), **options)
    group = groups_of(SIZES)
    for t in range(len(x)):
        alone = cpu.matmul(x[t : t + 1], one(weight, group[t]), **options)[0]
        np.testing.assert_array_equal(got[t], alone)
        np.testing.assert_array_equal(added[t], alone + bias[group[t]])
    if activations == "float32":
        want = np.einsum("tc,trc->tr", np.float64(x), np.float64(values)[group])
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("activations", ACTIVATION_TYPES)
@pytest.mark.parametrize("kind", ["q4_1", "mxfp4", "bfloat16"])
def test_bits_of_a_row_depend_on_nothing_else(kind: str, activations: str) -> None:
    weight, values = stack(kind, R=200)
    x, group = rows(33, values.shape[-1]), groups_of(SIZES)
    for isa in ISAS:
        options: dict[str, Any] = {"activations": activations, "isa": isa}

        def run(kept: np.ndarray, threads: int = 0, options=options) -> np.ndarray:
            sizes = jnp.asarray(np.bincount(group[kept], minlength=len(SIZES)), jnp.int32)
            return np.asarray(
                cpu.grouped_products(x[kept], (weight,), sizes, threads=threads, **options)[0]
            )

        whole = run(np.arange(33), threads=1)
        for _ in range(20 if isa == ISAS[-1] else 2):
            for kept in (np.arange(33), np.arange(25, 33), np.arange(0, 33, 4), np.array([17])):
                np.testing.assert_array_equal(run(kept), whole[kept])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates(activation: str, isa: str) -> None:
    weight, _ = stack("float32")
    sizes = jnp.asarray(SIZES, jnp.int32)
    gate, up = 8 * rows(33, 100), 8 * rows(33, 100, seed=2)
    gate = gate.at[0, :4].set(jnp.array([100.0, -100.0, 7.5, -7.5]))
    bias = rows(len(SIZES), 37, seed=4)
    want = xla.grouped_matmul(gated(gate, up, activation), weight, sizes, bias)
    got = cpu.grouped_gated_matmul(
        gate, up, weight, sizes, activation=activation, bias=bias, isa=isa
    )
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
    for bad in (gate.at[3, 1].set(jnp.nan), up), (gate, up.at[3, 1].set(jnp.nan)):
        spoilt = cpu.grouped_gated_matmul(*bad, weight, sizes, activation=activation, isa=isa)
        finite = np.isfinite(np.asarray(spoilt)).all(axis=1)
        np.testing.assert_array_equal(finite, np.arange(33) != 3)


def test_clamped_swiglu_is_what_gpt_oss_says() -> None:
    gate = np.array([-9.0, -7.0, 0.0, 1.0, 7.0, 8.0, 100.0], np.float32)
    up = np.array([-8.0, -7.0, 0.5, 2.0, 7.0, 9.0, -100.0], np.float32)
    g, u = np.minimum(np.float64(gate), 7), np.clip(np.float64(up), -7, 7)
    want = g / (1 + np.exp(-1.702 * g)) * (u + 1)
    np.testing.assert_allclose(gated(gate, up, "clamped_swiglu"), want, rtol=1e-6)
    identity = jnp.eye(7)
    for isa in ISAS:
        got = cpu.gated_matmul(gate[None], up[None], identity, activation="clamped_swiglu", isa=isa)
        np.testing.assert_allclose(got[0], want, rtol=3e-6)


def test_several_weights_are_one_call_and_the_same_bits() -> None:
    weights = [stack("q4_1")[0], stack("q4_1", R=20, seed=9)[0]]
    sizes, x = jnp.asarray(SIZES, jnp.int32), rows(33, 160)
    biases = rows(len(SIZES), 37), None
    together = jax.jit(cpu.grouped_products)(x, weights, sizes, biases=biases)
    for weight, bias, got in zip(weights, biases, together, strict=True):
        alone = cpu.grouped_products(x, (weight,), sizes, biases=(bias,))[0]
        np.testing.assert_array_equal(got, alone)
    lowered = jax.jit(cpu.grouped_products).lower(x, weights, sizes).as_text()
    assert lowered.count("custom_call @stoker") == 1


def test_rows_of_no_group_yield_zeros() -> None:
    weight, _ = stack("q4_1")
    x, bias = rows(40, 160), rows(len(SIZES), 37)
    sizes = jnp.asarray(SIZES, jnp.int32)
    (got,) = cpu.grouped_products(x.at[35].set(jnp.nan), (weight,), sizes, biases=(bias,))
    (want,) = cpu.grouped_products(x[:33], (weight,), sizes, biases=(bias,))
    np.testing.assert_array_equal(got, np.concatenate([want, np.zeros((7, 37))]))


@pytest.mark.parametrize("activations", ACTIVATION_TYPES)
@pytest.mark.parametrize("kind", ["q4_1", "bfloat16"])
def test_gathered_rows_are_rows(kind: str, activations: str) -> None:
    weight, values = stack(kind)
    x, sizes = rows(9, values.shape[-1]), jnp.asarray(SIZES, jnp.int32)
    order = jnp.asarray(np.random.default_rng(2).integers(0, 9, 33), jnp.int32)
    for isa in ISAS:
        options: dict[str, Any] = {"activations": activations, "isa": isa}
        (want,) = cpu.grouped_products(x[order], (weight,), sizes, **options)
        (got,) = cpu.grouped_products(x, (weight,), sizes, rows=order, **options)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("row", [-1, 9])
def test_rows_outside_are_errors_of_the_runtime(row: int) -> None:
    weight, values = stack("q4_1")
    order = jnp.zeros(33, jnp.int32).at[30].set(row)
    with pytest.raises(jax.errors.JaxRuntimeError, match="rows must be 0 or more and below 9"):
        jax.block_until_ready(
            cpu.grouped_products(
                *(rows(9, values.shape[-1]), (weight,), jnp.asarray(SIZES, jnp.int32)), rows=order
            )
        )


def test_no_rows() -> None:
    weight, _ = stack("q4_1")
    sizes = jnp.zeros(len(SIZES), jnp.int32)
    assert cpu.grouped_products(jnp.zeros((0, 160)), (weight,), sizes)[0].shape == (0, 37)


@pytest.mark.parametrize("sizes", [[5, -1], [-1, 5], [2, 3], [2**31 - 1, 2**31 - 1]])
def test_sizes_that_do_not_fit_are_errors_of_the_runtime(sizes: list[int]) -> None:
    weight, _ = stack("q8_0", groups=2)
    with pytest.raises(jax.errors.JaxRuntimeError, match="0 or more and sum to 4 or fewer"):
        jax.block_until_ready(
            cpu.grouped_products(jnp.ones((4, 96)), (weight,), jnp.asarray(sizes, jnp.int32))
        )


def test_wrong_arguments_are_named() -> None:
    weight, _ = stack("q8_0", groups=2)
    x, sizes = jnp.ones((4, 96)), jnp.array([1, 3], jnp.int32)
    with pytest.raises(StokerError, match=r"\[2, 37, 96\] does not take rows of 64 columns"):
        cpu.grouped_products(jnp.ones((4, 64)), (weight,), sizes)
    with pytest.raises(StokerError, match="in 3 groups"):
        cpu.grouped_products(x, (weight,), jnp.array([1, 3, 0], jnp.int32))
    with pytest.raises(StokerError, match=r"float32.*int32 vector"):
        cpu.grouped_products(x, (weight,), sizes.astype(jnp.float32))
    with pytest.raises(StokerError, match=r"bias float32\[2, 36\]"):
        cpu.grouped_products(x, (weight,), sizes, biases=(jnp.zeros((2, 36)),))
    with pytest.raises(StokerError, match=r"rows are int32\[4, 1\]; they must be an int32 vector"):
        cpu.grouped_products(x, (weight,), sizes, rows=jnp.zeros((4, 1), jnp.int32))
    with pytest.raises(StokerError, match="2 biases for 1 weights"):
        cpu.grouped_products(x, (weight,), sizes, biases=(None, None))
    with pytest.raises(StokerError, match="'relu' must be one of"):
        cpu.grouped_gated_matmul(x, x, weight, sizes, activation="relu")
    with pytest.raises(StokerError, match="one shape"):
        cpu.grouped_gated_matmul(x, x[1:], weight, sizes)


# Two groups of one tile, three records of 32 columns: sixteen halves, then codes of 4 bits.
@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"payload": (1, 1, 3, 288)}, (4, 32, 32, 8, 1, 1, 2, -1, -1, -1, 0, 0)),
        ({"payload": (1, 3, 288)}, (4, 32, 32, 8, 1, 1, 2, -1, -1, -1, 0, 0)),
        ({"bias": (2, 15)}, (4, 32, 32, 8, 1, 1, 2, -1, -1, -1, 0, 0)),
        ({"other": (4, 32)}, (4, 32, 32, 8, 1, 1, 2, -1, -1, -1, 0, 0)),
        ({"scratch": 100}, (4, 32, 32, 8, 1, 1, 2, -1, -1, -1, 0, 0)),
        ({"before": 1}, (4, 32, 32, 8, 1, 1, 2, -1, -1, -1, 0, 0)),
        ({"before": 2, "rows": (3,)}, (4, 32, 32, 8, 1, 1, 2, -1, -1, -1, 0, 0)),
        ({"before": 9}, (4, 32, 32, 8, 1, 1, 2, -1, -1, -1, 0, 0)),
        ({}, (8, 32, 32, 8, 1, 1, 2, -1, -1, -1, 5, 0)),  # a table of bytes
        ({}, (4, 32, 32, 8, 1, 1, 2, 2, -1, -1, 5, 0)),  # or with minima
        ({}, (4, 32, 32, 8)),
    ],
)
def test_handler_refuses_what_python_would_not_send(
    change: dict[str, Any], fields: tuple[int, ...]
) -> None:
    good = {"other": (4, 96), "payload": (2, 1, 3, 288), "bias": (2, 16), "scratch": 2000}
    shapes = good | {"before": 0, "rows": (0,)} | change
    results = [
        jax.ShapeDtypeStruct((4, 16), jnp.float32),
        jax.ShapeDtypeStruct((shapes["scratch"],), jnp.uint8),
    ]
    call = jax.ffi.ffi_call("stoker_grouped_matmul", results)
    with pytest.raises(jax.errors.JaxRuntimeError, match="grouped"):
        jax.block_until_ready(
            call(
                jnp.zeros((4, 96)),
                jnp.zeros(shapes["other"]),
                jnp.zeros(shapes["rows"], jnp.int32),
                jnp.array([1, 3], jnp.int32),
                jnp.zeros(shapes["payload"], jnp.uint8),
                jnp.zeros(shapes["bias"]),
                weights=np.array(fields, np.int64),
                before=np.int64(shapes["before"]),
                exact=False,
                isa=np.int64(0),
                threads=np.int64(0),
            )
        )
