"""Programs as XLA prints them: what counts as moved, by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from stoker.engine.compiling.cost_model import Surplus, explain
from stoker.engine.compiling.hlo import Instruction, Moved, Program

TEXT = """
HloModule example

%bitcast_fusion (x: bf16[64,64]) -> bf16[64,64] {
  %x = bf16[64,64]{1,0} parameter(0)
  ROOT %same = bf16[64,64]{1,0} bitcast(%x)
}

%rows (table: f32[1000,64], ids: s32[8]) -> f32[8,64] {
  %table = f32[1000,64]{1,0} parameter(0)
  %ids = s32[8]{0} parameter(1)
  ROOT %found = f32[8,64]{1,0} gather(%table, %ids), offset_dims={1}, slice_sizes={1,64}
}

%product (w: bf16[64,64], y: f32[8,64]) -> f32[8,64] {
  %w = bf16[64,64]{1,0} parameter(0)
  %y = f32[8,64]{1,0} parameter(1)
  %renamed = bf16[64,64]{1,0} fusion(%w), kind=kLoop, calls=%bitcast_fusion
  ROOT %out = f32[8,64]{1,0} dot(%y, %renamed), lhs_contracting_dims={1}
}

%update (pages: f32[1000,64], new: f32[8,64], at: s32[]) -> f32[1000,64] {
  %pages = f32[1000,64]{1,0} parameter(0)
  %new = f32[8,64]{1,0} parameter(1)
  %at = s32[] parameter(2)
  ROOT %written = f32[1000,64]{1,0} dynamic-update-slice(%pages, %new, %at, %at)
}

%nothing (z: f32[8,64]) -> f32[8,64] {
  ROOT %z = f32[8,64]{1,0} parameter(0)
}

%twice (v: f32[8,64]) -> f32[8,64] {
  %v = f32[8,64]{1,0} parameter(0)
  ROOT %sum = f32[8,64]{1,0} add(%v, %v)
}

ENTRY %main (a: f32[1000,64], b: s32[8], c: bf16[64,64], d: s32[], p: pred[]) -> f32[8,64] {
  %a = f32[1000,64]{1,0} parameter(0), metadata={op_name="a (odd)"}
  %b = s32[8]{0} parameter(1)
  %c = bf16[64,64]{1,0:T(8,128)(2,1)} parameter(2)
  %d = s32[] parameter(3)
  %p = pred[] parameter(4)
  %r = f32[8,64]{1,0:T(8,128)S(1)} fusion(%a, %b), kind=kLoop, calls=%rows
  %s = (bf16[64,64]{1,0:T(8,128)S(1)}, bf16[64,64]{1,0}, u32[]{:S(2)}) copy-start(%c)
  %t = bf16[64,64]{1,0:T(8,128)S(1)} copy-done(%s)
  %m = f32[8,64]{1,0} fusion(%c, %r), kind=kOutput, calls=%product
  %n = f32[8,64]{1,0} fusion(%t, %r), kind=kOutput, calls=%product
  %u = f32[1000,64]{1,0} fusion(%a, %m, %d), kind=kLoop, calls=%update
  %stoker_matmul.1 = f32[8,64]{1,0} bitcast(%m)
  %k = f32[8,64]{1,0} custom-call(%stoker_matmul.1, %u), custom_call_target="tpu_custom_call", \
metadata={op_name="jit(f)/stoker_attention"}
  %g = f32[8,64]{1,0} all-reduce(%k), replica_groups={}
  ROOT %e = f32[8,64]{1,0} conditional(%p, %g, %g), true_computation=%nothing, \
false_computation=%twice
}
""".replace("\\\n", "")
ROWS, MATRIX, TABLE = 8 * 64 * 4, 64 * 64 * 2, 1000 * 64 * 4


def moved(name: str) -> tuple[float, float]:
    program = Program(TEXT)
    entry = program.computations[program.entry]
    found = program.moved(entry[name], entry)
    return found.read, found.write


@pytest.mark.parametrize(
    ("name", "read", "write"),
    [
        ("r", ROWS + 32, 0),  # looked up, into vector memory
        ("s", MATRIX, 0),  # prefetched
        ("t", 0, 0),
        ("m", MATRIX, ROWS),  # a nested fusion only renames the matrix
        ("n", 0, ROWS),  # the matrix is in vector memory
        ("u", ROWS + 4, ROWS),  # in place
        ("g", ROWS, ROWS),
    ],
)
def test_bytes_of_instructions(name: str, read: float, write: float) -> None:
    assert moved(name) == (read, write)


def test_the_cheapest_branch_counts_and_custom_calls_as_told() -> None:
    program = Program(TEXT)
    rest = sum(sum(moved(name)) for name in "rstmnug")
    assert program.bytes() == rest + 2 * ROWS + TABLE

    def nothing(one: Instruction, operands: object) -> Moved:
        assert one.name == "k"
        return Moved(0, 7)

    assert program.bytes(nothing) == rest + 7
    assert program.collectives() == {"all-reduce": 1}
    assert program.kernels() == {"stoker_attention": 1}
    assert program.largest("all-reduce") == 8 * 64


def test_real_programs() -> None:
    """A product reads its operands once in each round of a loop."""

    def steps(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 5, lambda _, x: x @ w, x)

    shapes = jax.ShapeDtypeStruct((8, 64), jnp.float32), jax.ShapeDtypeStruct((64, 64), jnp.float32)
    program = Program(jax.jit(steps).lower(*shapes).compile().as_text() or "")
    once = 4 * (64 * 64 + 2 * 8 * 64)
    assert 5 * once <= program.bytes() <= 5 * once + 16 * once


#: As compilers for TPUs print loops: how often they run is in their condition.
LOOP = """
%body (s: (s32[], f32[8,64])) -> (s32[], f32[8,64]) {
  %s = (s32[], f32[8,64]{1,0}) parameter(0)
  %x = f32[8,64]{1,0} get-tuple-element(%s), index=1
  %i = s32[] get-tuple-element(%s), index=0
  %y = f32[8,64]{1,0} tanh(%x)
  ROOT %next = (s32[], f32[8,64]{1,0}) tuple(%i, %y)
}

%again (t: (s32[], f32[8,64])) -> pred[] {
  %t = (s32[], f32[8,64]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %limit = s32[]{:T(128)} constant(7)
  ROOT %less = pred[] compare(%n, %limit), direction=LT
}

ENTRY %main (o: (s32[], f32[8,64])) -> (s32[], f32[8,64]) {
  %o = (s32[], f32[8,64]{1,0}) parameter(0)
  ROOT %w = (s32[], f32[8,64]{1,0}) while(%o), condition=%again, body=%body
}
"""


def test_loops_count_as_often_as_they_run() -> None:
    program = Program(LOOP)
    assert program.bytes() == 7 * 2 * ROWS
    # The cost model counts them once.
    assert explain(program, 2 * ROWS) == Surplus(loops=-6 * 2 * ROWS)


def test_what_the_cost_model_counts_besides_is_told_apart() -> None:
    """Of the program above, by hand; tiles of 128 columns pad arrays of 64 to twice their size."""
    program = Program(TEXT)
    model = program.bytes() + 12345
    found = explain(program, model)
    known = Surplus(
        kernels=-(2 * ROWS + TABLE),
        copies=3 * MATRIX,  # `s` as three of it, of which one is read, and `t`
        vector_memory=3 * ROWS + MATRIX,  # `r` once written and twice read, and `t`
        whole_arrays=(TABLE - ROWS) + ROWS,  # looked up by `r`; the rows that `u` writes over
        branches=3 * ROWS,
        padding=3 * ROWS + 2 * MATRIX,
    )
    assert found == known + Surplus(other=12345 - known.total)
    assert found.total == 12345


def test_the_cost_model_of_a_real_program_is_explained() -> None:
    """XLA's own figure for this machine: nothing is left over."""

    def step(pages: jax.Array, ids: jax.Array, x: jax.Array, w: jax.Array, much: jax.Array) -> Any:
        pages = pages.at[ids].set(x)
        x = jax.lax.fori_loop(0, 5, lambda _, x: jnp.tanh(x @ w), x)
        return pages, jax.lax.cond(much, lambda: jnp.sort(x @ w @ w), lambda: x)

    shapes = [(5000, 64), (8,), (8, 64), (64, 64), ()]
    types: list[Any] = [jnp.float32, jnp.int32, jnp.float32, jnp.float32, bool]
    structs = map(jax.ShapeDtypeStruct, shapes, types)
    made = jax.jit(step, donate_argnums=0).lower(*structs).compile()
    costs: Any = made.cost_analysis()
    program = Program(made.as_text() or "")
    found = explain(program, costs["bytes accessed"])
    assert program.bytes() + found.total == pytest.approx(costs["bytes accessed"])
    assert found.loops < -4 * 64 * 64 * 4
    assert found.branches > 2 * 64 * 64 * 4
    assert abs(found.other) < 0.02 * costs["bytes accessed"], found
