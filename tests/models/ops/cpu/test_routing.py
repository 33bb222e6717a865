"""Choosing experts, sorting and summing their rows, and norms, by the compiled kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stoker.models.errors import StokerError
from stoker.models.ops import cpu, xla
from stoker.models.parts import PLAIN_ROUTER, Router

LIBRARY = cpu.load()
assert LIBRARY is not None, cpu.why_unavailable()
ISAS = LIBRARY.isas
RNG = np.random.default_rng(8)
RULES = {
    "mixtral": (8, 2, True, PLAIN_ROUTER),
    "qwen": (128, 8, False, PLAIN_ROUTER),
    "one": (1, 1, True, PLAIN_ROUTER),
    "all": (5, 5, True, PLAIN_ROUTER),
    "v2": (160, 6, False, Router(groups=8, used_groups=3, scale=16.0)),
    "v3": (256, 8, True, Router("sigmoid", True, 8, 4, 2, 2.5)),
}


def floats(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape).astype(np.float32))


@pytest.mark.parametrize("name", RULES)
def test_choices_are_those_of_the_reference(name: str) -> None:
    E, count, normalise, router = RULES[name]
    logits = 3 * floats(70, E)
    bias = 0.1 * floats(E) if router.choice_bias else None
    weights, chosen = cpu.route(logits, bias, count, normalise, router)
    want, wanted = xla.route(logits, bias, count, normalise, router)
    np.testing.assert_array_equal(chosen, wanted)
    np.testing.assert_allclose(weights, want, rtol=2e-6)


@pytest.mark.parametrize("name", ["qwen", "v3"])
def test_bits_of_a_choice_depend_on_its_row_only(name: str) -> None:
    E, count, normalise, router = RULES[name]
    logits, bias = 3 * floats(70, E), 0.1 * floats(E) if router.choice_bias else None
    whole = cpu.route(logits, bias, count, normalise, router, threads=1)
    for kept in (np.arange(70), np.arange(60, 70), np.arange(0, 70, 7), np.array([33])):
        some = cpu.route(logits[kept], bias, count, normalise, router)
        for got, want in zip(some, whole, strict=True):
            np.testing.assert_array_equal(got, want[kept])


def test_equal_scores_and_scores_that_are_no_numbers() -> None:
    nan, inf = np.nan, np.inf
    logits = jnp.array([[0, 1, 1, 0], [-90, -1e30, 5, -inf], [1, nan, 2, 3], [0, inf, 0, 0]])
    weights, chosen = cpu.route(logits, None, 3, True, PLAIN_ROUTER)
    np.testing.assert_array_equal(chosen[:2], [[1, 2, 0], [2, 0, 1]])
    np.testing.assert_array_equal(weights[1], [1, 0, 0])
    assert np.isnan(weights[2:]).all()
    assert all(len({*row}) == 3 and {*row} <= {0, 1, 2, 3} for row in chosen.tolist())
    logits = jnp.array([[1e4, -1e4, nan, 0.0]])
    weights, chosen = cpu.route(logits, None, 3, False, Router("sigmoid"))
    np.testing.assert_array_equal(chosen, [[2, 0, 3]])
    np.testing.assert_array_equal(weights, [[nan, 1, 0.5]])


@pytest.mark.parametrize(("T", "count"), [(0, 2), (1, 8), (300, 4)])
@pytest.mark.parametrize(("first", "held"), [(0, 16), (4, 4), (16, 3)])
def test_pairs_are_sorted_as_by_the_reference(T: int, count: int, first: int, held: int) -> None:
    chosen = jnp.asarray(RNG.integers(0, 16, (T, count)), jnp.int32)
    for got, want in zip(
        jax.jit(cpu.deal, static_argnums=2)(chosen, first, held),
        xla.deal(chosen, first, held),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)
        assert got.dtype == want.dtype == jnp.int32


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("D", [1, 37, 4096])
@pytest.mark.parametrize("count", [1, 3])
def test_sums_of_rows(count: int, D: int, isa: str) -> None:
    x, weights = floats(11 * count, D), floats(11, count)
    places = jnp.asarray(RNG.permutation(11 * count).reshape(11, count), jnp.int32)
    got = np.asarray(cpu.combine(x, places, weights, isa=isa))
    want = np.einsum("tkd,tk->td", np.float64(x)[np.asarray(places)], np.float64(weights))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max())
    for kept in (np.array([4]), np.arange(2, 11)):
        some = cpu.combine(x, places[kept], weights[kept], isa=isa, threads=1)
        np.testing.assert_array_equal(some, got[kept])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("D", [1, 37, 4096])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms(dtype: str, D: int, isa: str) -> None:
    x, weight = floats(11, D).astype(dtype).at[3].set(jnp.nan), floats(D)
    got = np.asarray(cpu.rms_norm(x, weight, 1e-5, isa=isa))
    wide = np.float64(x)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    for kept in (np.array([4]), np.arange(2, 11)):
        np.testing.assert_array_equal(cpu.rms_norm(x[kept], weight, 1e-5, isa=isa), got[kept])
    # What a product makes of its input first is the same norm.
    within = cpu.products(x, (jnp.eye(D),), norm=(weight, 1e-5), isa=isa)[0] if D == 37 else got
    np.testing.assert_array_equal(within[4:], got[4:])


def test_wrong_arguments_are_named() -> None:
    logits, places = jnp.zeros((3, 8)), jnp.zeros((3, 2), jnp.int32)
    with pytest.raises(StokerError, match=r"scores of experts are bfloat16\[3, 8\]"):
        cpu.route(logits.astype("bfloat16"), None, 2, True, PLAIN_ROUTER)
    with pytest.raises(StokerError, match="cannot give the 9 experts"):
        cpu.route(logits, None, 9, True, PLAIN_ROUTER)
    with pytest.raises(StokerError, match="at least one"):
        cpu.route(logits, None, 0, True, PLAIN_ROUTER)
    with pytest.raises(StokerError, match=r"bias of choices: got float32\[7\]"):
        cpu.route(logits, jnp.zeros(7), 2, True, PLAIN_ROUTER)
    with pytest.raises(StokerError, match=r"numbers of experts are float32\[3, 8\]"):
        cpu.deal(logits, 0, 8)
    with pytest.raises(StokerError, match=r"places are float32\[3, 8\]"):
        cpu.combine(logits, logits, logits)
    with pytest.raises(StokerError, match=r"weights of rows: got float32\[3, 8\]"):
        cpu.combine(logits, places, logits)
    with pytest.raises(StokerError, match=r"rows to norm are int32\[3, 2\]"):
        cpu.rms_norm(places, jnp.zeros(2), 1e-5)
    with pytest.raises(StokerError, match=r"weight of a norm: got float32\[3\]"):
        cpu.rms_norm(logits, jnp.zeros(3), 1e-5)
    with pytest.raises(StokerError, match="instruction set 'neon'"):
        cpu.rms_norm(logits, jnp.zeros(8), 1e-5, isa="neon")


@pytest.mark.parametrize("place", [-1, 3])
def test_places_outside_are_errors_of_the_runtime(place: int) -> None:
    x, places = jnp.zeros((3, 8)), jnp.full((1, 1), place, jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="places must be 0 or more and below 3"):
        jax.block_until_ready(cpu.combine(x, places, jnp.ones((1, 1))))


@pytest.mark.parametrize(
    "change", [{"groups": 3}, {"used_groups": 3}, {"used_groups": 0}, {"group_top": 5}, {"n": 9}]
)
def test_handler_refuses_what_python_would_not_send(change: dict[str, int]) -> None:
    given = {"groups": 2, "used_groups": 2, "group_top": 1, "n": 2} | change
    shape = (3, given.pop("n"))
    results = (jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32))
    call = jax.ffi.ffi_call("stoker_route", results)
    numbers = {name: np.int64(value) for name, value in given.items()}
    others = {"sigmoid": False, "normalise": True, "scale": np.float32(1), "threads": np.int64(0)}
    with pytest.raises(jax.errors.JaxRuntimeError, match="route: so many experts"):
        jax.block_until_ready(call(jnp.zeros((3, 8)), jnp.zeros(0), **numbers, **others))
