"""Attention of the compiled kernels over int8 pages, against float64 on what the pages hold."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged

from stoker.models.errors import StokerError
from stoker.models.ops import Layout, QuantPages, cpu, xla

LIBRARY = cpu.load()
assert LIBRARY is not None, cpu.why_unavailable()
ISAS = LIBRARY.isas

CASES = {
    name: case for name, case in ragged.GRID.items() if case.pages == "int8" and case.by_token
} | {
    "long": ragged.Case((1, 1, 1), (5, 300, 1000), N=9, K=3, H=64, pages="int8"),
    "many_rows": ragged.Case((50, 1), (600, 20), N=8, K=2, H=128, Z=32, pages="int8"),
    "odd_head": ragged.Case((9, 1), (70, 30), N=3, K=3, H=13, pages="int8"),
    "window_and_cap": ragged.Case(
        (30, 2), (600, 520), N=4, K=2, H=20, Z=48, pages="int8", window=270, softcap=3.0
    ),
    "sinks": ragged.Case((3, 1), (90, 20), N=6, K=2, H=80, pages="int8", sinks=True),
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str, isa: str) -> None:
    step = ragged.ragged_step(CASES[name])
    result = cpu.attention(*step.arrays, step.layout, **step.options, isa=isa)
    ragged.check(step, result, 5e-6)


@pytest.mark.parametrize("isa", ISAS)
def test_parts_of_pages_make_up_the_whole(isa: str) -> None:
    step = ragged.ragged_step(dataclasses.replace(ragged.SHARED["mixed"], pages="int8"))
    options = {name: value for name, value in step.options.items() if name != "sinks"}

    def part(share: jax.Array, *arrays: object) -> object:
        return cpu.partial_attention(*arrays, share=share, shares=4, isa=isa, **options)

    ragged.check_shares(step, jax.jit(part), 4, 1e-5)


@pytest.mark.parametrize("isa", ISAS)
def test_pages_are_those_of_the_reference(isa: str) -> None:
    """Codes to the last, also of rows of zeros, of one number, and of NaN."""
    step = ragged.ragged_step(dataclasses.replace(CASES["long"], rows=(5, 1, 1), padding=0))
    q, k, v, *pages = step.arrays
    k = k.at[0].set(0).at[1].set(-2.5).at[2, 0, 7].set(jnp.nan)
    want = xla.attention(q, k, v, *pages, step.layout, **step.options)[1:]
    got = cpu.attention(q, k, v, *pages, step.layout, **step.options, isa=isa)[1:]
    for ours, theirs in zip(got, want, strict=True):
        known = np.isfinite(theirs.scale)
        np.testing.assert_array_equal(np.isfinite(ours.scale), known)
        np.testing.assert_allclose(
            np.asarray(ours.scale)[known], np.asarray(theirs.scale)[known], rtol=1e-6
        )
        token_axis = 3 if ours is got[0] else 2
        codes, exact = (
            np.moveaxis(np.asarray(x.codes), token_axis, 2)[known] for x in (ours, theirs)
        )
        np.testing.assert_array_equal(codes, exact)


@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("isa", ISAS)
def test_bits_do_not_depend_on_chunks_or_threads(isa: str, window: int) -> None:
    case = ragged.Case((700,), (700,), N=6, K=2, H=32, padding=0, pages="int8", window=window)
    step = ragged.ragged_step(case)
    attend = functools.partial(cpu.attention, **step.options, isa=isa)
    whole = np.asarray(attend(*step.arrays, step.layout)[0])
    for sizes in ([699, 1], [1, 16, 17, 250, 416]):
        for threads in (1, 0):
            pages, done, parts = step.arrays[3:], 0, []
            for n in sizes:
                layout = step.layout.replace(
                    query_start=jnp.asarray([0, n], jnp.int32),
                    kv_lens=jnp.asarray([done + n], jnp.int32),
                )
                rows = (x[done : done + n] for x in step.arrays[:3])
                out, *pages = attend(*rows, *pages, layout, threads=threads)
                parts.append(np.asarray(out))
                done += n
            np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_donated_pages_are_updated_in_place() -> None:
    step = ragged.ragged_step(CASES["long"])
    attend = functools.partial(cpu.attention, **step.options)
    # Memory that numpy owns cannot be donated.
    own = jax.tree.map(lambda x: x + 0, step.arrays[3:])
    before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(own)]
    _, *after = jax.jit(attend, donate_argnums=(3, 4))(*step.arrays[:3], *own, step.layout)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(after)] == before


def test_wrong_scales_are_named() -> None:
    step = ragged.ragged_step(CASES["odd_head"])
    q, k, v, k_pages, v_pages = step.arrays
    attend = functools.partial(cpu.attention, q, k, v, layout=step.layout, **step.options)
    with pytest.raises(StokerError, match="k_pages of int8 without scales"):
        attend(k_pages=k_pages.codes, v_pages=v_pages)
    with pytest.raises(StokerError, match=r"v_pages that are float32 \[13, 3, 8\].* \[13, 3, 16\]"):
        attend(k_pages=k_pages, v_pages=QuantPages(v_pages.codes, v_pages.scale[..., :8]))
    with pytest.raises(StokerError, match="k_pages that are float16"):
        attend(k_pages=k_pages.replace(scale=k_pages.scale.astype("float16")), v_pages=v_pages)
    with pytest.raises(StokerError, match="pages of int8 and float32"):
        attend(k_pages=k_pages, v_pages=jnp.zeros(v_pages.shape))


def test_handler_refuses_what_python_would_not_send() -> None:
    step = ragged.ragged_step(CASES["odd_head"])
    q, k, v, k_pages, v_pages = step.arrays
    layout: Layout = step.layout
    turn = jnp.zeros((q.shape[0], 0))
    rest = (
        layout.query_start,
        layout.kv_lens,
        layout.page_table,
        jnp.zeros(0),
        jnp.zeros(0, "int32"),
    )
    plain = jnp.zeros(k_pages.shape), jnp.zeros(v_pages.shape)
    codes, scales = (k_pages.codes, v_pages.codes), (k_pages.scale, v_pages.scale)

    def call(pages: tuple[jax.Array, ...], scales: tuple[jax.Array, ...]) -> None:
        results = [
            jax.ShapeDtypeStruct(shape, dtype)
            for shape, dtype in [(q.shape, jnp.float32), ((0, 0), jnp.float32)]
            + [(x.shape, x.dtype) for x in (*pages, *scales)]
        ]
        aliases = {5: 2, 6: 3} | {12 + i: 4 + i for i in range(len(scales))}
        function = jax.ffi.ffi_call("stoker_attention", results, input_output_aliases=aliases)
        attributes = {"window": np.int64(0), "softcap": np.float32(0), "scale": np.float32(1)}
        attributes |= {"isa": np.int64(0), "threads": np.int64(0)}
        attributes |= {"shares": np.int64(1), "rounded": np.bool_(False)}
        arrays = (q, k, v, turn, turn, *pages, *rest, *scales)
        jax.block_until_ready(function(*arrays, **attributes))

    call(codes, scales)
    for pages, given in [(codes, ()), (codes, scales[:1]), (plain, scales)]:
        with pytest.raises(jax.errors.JaxRuntimeError, match="scales come with int8 pages"):
            call(pages, given)
    for wrong in (scales[0][..., :8], scales[0].astype("float16")):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"scales must be float32 \[P, K, Z\]"):
            call(codes, (scales[0], wrong))
