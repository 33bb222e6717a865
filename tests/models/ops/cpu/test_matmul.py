"""Products by the compiled kernels, against float64 and a plain emulation of int8 activations."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantised import FORMATS, random_quant

from stoker.models.config import ACTIVATION_TYPES
from stoker.models.errors import StokerError
from stoker.models.ops import cpu
from stoker.models.quantized import QuantArray, dequantize

LIBRARY = cpu.load()
assert LIBRARY is not None, cpu.why_unavailable()
ISAS = LIBRARY.isas


def rows(T: int, C: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(T, C)).astype(np.float32)


def product(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T


def as_int8(x: np.ndarray, block: int) -> np.ndarray:
    """What x is once each block of a row is rounded to 127ths of its largest element."""
    blocks = x.reshape(len(x), -1, block)
    largest = np.abs(blocks).max(-1, keepdims=True)
    codes = np.rint(blocks * (np.float32(127) / largest))
    return (codes.astype(np.float64) * (largest / np.float32(127))).reshape(x.shape)


def check(array: QuantArray, x: np.ndarray, activations: str, isa: str) -> None:
    packed = cpu.pack(array)
    got = cpu.matmul(x, packed, activations=activations, isa=isa)
    seen = as_int8(x, packed.block) if activations == "int8" else x
    want = product(seen, dequantize(array))
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-6 * np.abs(want).max())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("activations", ACTIVATION_TYPES)
def test_quantised_weights(name: str, activations: str, isa: str) -> None:
    array = random_quant(name, 37)
    check(array, rows(13, array.shape[1]), activations, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q8_0", "q4_k", "q6_k"])
def test_the_largest_sums_fit(name: str, isa: str) -> None:
    """Integer sums of a block are of no more than 16 bits in places."""
    array = random_quant(name, 37)
    least, most = (0, 0xFF) if array.bits == 4 else (-128, 127)
    codes = np.full_like(array.codes, most)
    codes[::2] = least
    array = dataclasses.replace(array, codes=codes)
    signs = np.sign(rows(5, array.shape[1]))
    signs[0], signs[1] = 1, -1
    check(array, signs, "int8", isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activations", ACTIVATION_TYPES)
def test_a_zero_point_beside_minima(activations: str, isa: str) -> None:
    array = dataclasses.replace(random_quant("q4_1", 37), zero_point=8)
    check(array, rows(13, array.shape[1]), activations, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [(16, 64), (37, 100), (3, 7), (1, 1)])
def test_dense_weights(shape: tuple[int, int], dtype: jnp.dtype, isa: str) -> None:
    weight = jnp.asarray(rows(*shape, seed=2), dtype)
    x = rows(13, shape[1])
    want = product(x, np.asarray(weight, np.float32))
    got = cpu.matmul(x, weight, isa=isa)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_special_values_of_dense_weights(dtype: jnp.dtype) -> None:
    """Subnormal halves, infinite and NaN elements are widened as they are."""
    tiny = 6e-8 if dtype == jnp.float16 else 1e-30
    weight = jnp.asarray([[tiny], [np.inf], [np.nan], [-2.5], [0.0]], dtype)
    for isa in ISAS:
        got = np.asarray(cpu.matmul(jnp.ones((1, 1)), weight, isa=isa))[0]
        np.testing.assert_array_equal(got, np.asarray(weight, np.float32)[:, 0])


@pytest.mark.parametrize("activations", ACTIVATION_TYPES)
@pytest.mark.parametrize("name", ["q4_1", "q8_0", "q6_k", "long_row", "dense"])
def test_bits_of_a_row_depend_on_nothing_else(name: str, activations: str) -> None:
    if name == "dense":
        weight: cpu.PackedArray | jax.Array = jnp.asarray(rows(200, 160), jnp.bfloat16)
    else:
        weight = cpu.pack(random_quant(name, 200))
    x = rows(33, weight.shape[1])
    for isa in ISAS:
        every = np.asarray(cpu.matmul(x, weight, activations=activations, isa=isa, threads=1))
        for _ in range(50 if isa == ISAS[-1] else 3):
            for T in (1, 8, 33):
                again = cpu.matmul(x[-T:], weight, activations=activations, isa=isa)
                np.testing.assert_array_equal(again, every[-T:])


@pytest.mark.parametrize("name", FORMATS)
def test_avx2_and_avx512_agree_bitwise(name: str) -> None:
    packed = cpu.pack(random_quant(name, 37))
    x = rows(9, packed.shape[1])
    first, *others = (cpu.matmul(x, packed, isa=isa) for isa in ISAS if isa != "portable")
    for other in others:
        np.testing.assert_array_equal(other, first)


def test_many_weights_are_one_call_and_the_same_bits() -> None:
    weights = [
        cpu.pack(random_quant("q4_k", 40)),
        jnp.asarray(rows(20, 512), jnp.bfloat16),
        cpu.pack(random_quant("q4_k", 5, seed=3)),
    ]
    x = rows(70, 512)
    together = jax.jit(cpu.products)(x, weights)
    for weight, got in zip(weights, together, strict=True):
        np.testing.assert_array_equal(got, cpu.matmul(x, weight))
    assert jax.jit(cpu.products).lower(x, weights).as_text().count("custom_call") == 1


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("T", [1, 9, 70])
@pytest.mark.parametrize("activations", ACTIVATION_TYPES)
def test_norm_before_products(activations: str, T: int, isa: str) -> None:
    packed, dense = cpu.pack(random_quant("q4_1", 20)), jnp.asarray(rows(7, 160))
    x, weight = 3 * rows(T, 160), rows(1, 160, seed=5)[0]
    got = cpu.products(x, (packed, dense), norm=(weight, 1e-5), activations=activations, isa=isa)
    normed = x / np.sqrt((np.float64(x) ** 2).mean(-1, keepdims=True) + 1e-5) * weight
    # A code on the verge of rounding may fall either way.
    loose = 1e-3 if activations == "int8" else 3e-6
    seen = as_int8(np.float32(normed), packed.block) if activations == "int8" else normed
    for result, want, slack in (
        (got[0], product(seen, dequantize(cpu.unpack(packed))), loose),
        (got[1], product(normed, dense), 3e-6),
    ):
        np.testing.assert_allclose(result, want, rtol=0, atol=slack * np.abs(want).max())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("T", [1, 9, 70])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_before_product(activation: str, T: int, isa: str) -> None:
    gate, up = 8 * rows(T, 160), rows(T, 160, seed=5)
    gate[0, :4] = [100, -100, 1e30, -1e30]
    wide = np.float64(gate)
    if activation == "silu":
        opened = wide / (1 + np.exp(np.minimum(-wide, 700)))
    else:
        inner = np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
        opened = 0.5 * wide * (1 + np.tanh(inner))
    up[0, 2] = 1e-30
    want = product(opened * up, weight := rows(11, 160))
    got = cpu.gated_matmul(gate, up, jnp.asarray(weight), activation=activation, isa=isa)
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-6 * np.abs(want).max())
    packed = cpu.pack(random_quant("q4_1", 20))
    close = cpu.gated_matmul(gate, up, packed, activation=activation, isa=isa)
    want = product(as_int8(np.float32(opened * up), 32), dequantize(cpu.unpack(packed)))
    np.testing.assert_allclose(close, want, rtol=0, atol=1e-3 * np.abs(want).max())


def test_bits_of_a_row_after_norm_or_gate_depend_on_nothing_else() -> None:
    packed = cpu.pack(random_quant("q4_1", 200))
    x, up, norm = rows(33, 160), rows(33, 160, seed=5), (jnp.ones(160), 1e-6)
    every = [cpu.products(x, (packed,), norm=norm, threads=1)[0], cpu.gated_matmul(x, up, packed)]
    for T in (1, 8):
        some = [
            cpu.products(x[-T:], (packed,), norm=norm)[0],
            cpu.gated_matmul(x[-T:], up[-T:], packed),
        ]
        for one, all_rows in zip(some, every, strict=True):
            np.testing.assert_array_equal(one, all_rows[-T:])


def test_unpacked_weights_work_too() -> None:
    array = random_quant("q4_1", 20)
    x = rows(4, 160)
    want = product(x, dequantize(array))
    np.testing.assert_allclose(cpu.matmul(x, array), want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("isa", ISAS)
def test_codes_do_not_hide_what_is_not_finite(bad: float, isa: str) -> None:
    packed = cpu.pack(random_quant("q8_0", 16))
    x = rows(3, 96)
    x[1, 40] = bad
    got = np.asarray(cpu.matmul(x, packed, isa=isa))
    assert np.isnan(got[1]).all()
    assert np.isfinite(got[[0, 2]]).all()


@pytest.mark.parametrize("size", [0.0, 1e-38, 1e30])
def test_extreme_rows(size: float) -> None:
    packed = cpu.pack(random_quant("q4_1", 16))
    x = np.full((2, 160), size, np.float32)
    want = product(x, dequantize(cpu.unpack(packed)))
    np.testing.assert_allclose(cpu.matmul(x, packed), want, rtol=1e-2, atol=1e-30)


def test_empty_batch() -> None:
    assert cpu.matmul(jnp.zeros((0, 96)), cpu.pack(random_quant("q8_0", 16))).shape == (0, 16)


def test_under_scan_and_vmap() -> None:
    packed = cpu.pack(random_quant("q4_0", 96))
    x = jnp.asarray(rows(6, 96)).reshape(2, 3, 96)
    want = np.stack([cpu.matmul(one, packed) for one in x])
    _, scanned = jax.lax.scan(lambda carry, one: (carry, cpu.matmul(one, packed)), 0, x)
    np.testing.assert_array_equal(scanned, want)
    np.testing.assert_array_equal(jax.vmap(lambda one: cpu.matmul(one, packed))(x), want)


def test_wrong_arguments_are_named() -> None:
    packed = cpu.pack(random_quant("q4_0", 16))
    with pytest.raises(StokerError, match=r"\[16, 96\] does not take rows of 64 columns"):
        cpu.matmul(jnp.zeros((1, 64)), packed)
    with pytest.raises(StokerError, match="int32"):
        cpu.matmul(jnp.zeros((1, 96), jnp.int32), packed)
    with pytest.raises(StokerError, match="weight of type int8"):
        cpu.matmul(jnp.zeros((1, 96)), jnp.zeros((4, 96), jnp.int8))
    with pytest.raises(StokerError, match="'int4' must be one of float32, int8"):
        cpu.matmul(jnp.zeros((1, 96)), packed, activations="int4")
    with pytest.raises(StokerError, match="'sse9' is not among best, portable"):
        cpu.matmul(jnp.zeros((1, 96)), packed, isa="sse9")
    with pytest.raises(StokerError, match=r"\[16, 96\] has records of 4 bits to a code, not 8"):
        cpu.matmul(jnp.zeros((1, 96)), packed.replace(bits=8))
    with pytest.raises(StokerError, match=r"blocks of 96 columns.*kernels take blocks up to 32"):
        cpu.matmul(jnp.zeros((1, 96)), packed.replace(block=96))
    with pytest.raises(StokerError, match=r"zero point 8; .* no zero point beside minima"):
        least = cpu.pack(random_quant("q4_1", 16)).replace(zero_point=8)
        cpu.matmul(jnp.zeros((1, 160)), least)


# Three records of 32 columns: sixteen halves, then codes of 4 bits.
GOOD = {"x": (2, 96), "payload": (1, 3, 288), "scratch": 1000}
NONE = (-1, -1, -1)


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({}, (4, 32, 32, 8, 1, 1, 2, 2, -1, -1)),  # claims a minimum that is not there
        ({}, (4, 32, 32, 8, 1, 1, 2, -1, 2, -1)),  # or a factor
        ({}, (4, 32, 32, 8, 1, 1, -1, 2, -1, -1)),  # no scale
        ({}, (4, 32, 32, 8, 1, 1, 9, *NONE)),
        ({}, (5, 32, 32, 8, 1, 1, 2, *NONE)),
        ({}, (4, 0, 32, 8, 1, 1, 2, *NONE)),
        ({}, (4, 32, 0, 8, 1, 1, 2, *NONE)),
        ({}, (4, 32, 12, 8, 1, 1, 2, *NONE)),
        ({}, (4, 32, 32, 999, 1, 1, 2, *NONE)),
        ({}, (8, 32, 32, 8, 1, 1, 2, *NONE)),
        ({}, (4, 32, 32, 8, 0, 1, 2, *NONE)),
        ({}, (4, 32, 32, 8, 2, 1, 2, *NONE)),
        ({}, (4, 32, 32, 8, 1, 0, 2, *NONE)),
        ({}, (4, 32, 32, 8, 1, 2, 2, *NONE)),
        ({}, (4, 1 << 60, 32, 8, 96, 1, 2, *NONE)),
        ({}, (0,) * 10),
        ({}, (4, 32, 32, 8)),
        ({"payload": (1, 2, 288)}, (4, 32, 32, 8, 1, 1, 2, *NONE)),
        ({"payload": (1, 3, 287)}, (4, 32, 32, 8, 1, 1, 2, *NONE)),
        ({"x": (2, 64)}, (4, 32, 32, 8, 1, 1, 2, *NONE)),
        ({"x": (2, 3, 96)}, (4, 32, 32, 8, 1, 1, 2, *NONE)),
        ({"scratch": 100}, (4, 32, 32, 8, 1, 1, 2, *NONE)),
    ],
)
def test_handler_refuses_what_python_would_not_send(
    change: dict[str, object], fields: tuple[int, ...]
) -> None:
    shapes = GOOD | change
    results = [
        jax.ShapeDtypeStruct((2, 16), jnp.float32),
        jax.ShapeDtypeStruct((shapes["scratch"],), jnp.uint8),
    ]
    call = jax.ffi.ffi_call("stoker_matmul", results)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"matmul|rank|[Ww]rong"):
        jax.block_until_ready(
            call(
                jnp.zeros(shapes["x"]),
                jnp.zeros(shapes["x"]),
                jnp.zeros(shapes["payload"], jnp.uint8),
                weights=np.array((*fields, 0, 0), np.int64),
                before=np.int64(0),
                eps=np.float32(0),
                exact=False,
                isa=np.int64(0),
                threads=np.int64(0),
            )
        )
