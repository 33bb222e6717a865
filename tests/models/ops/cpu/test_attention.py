"""Paged attention by the compiled kernels, against float64 on one sequence at a time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged

from stoker.models.errors import StokerError
from stoker.models.ops import Layout, cpu, xla
from stoker.models.ops.elementwise import rotate

LIBRARY = cpu.load()
assert LIBRARY is not None, cpu.why_unavailable()
ISAS = LIBRARY.isas


# Axes that turn key and value pages [P, Z, K, H] into what the kernels take, and back.
FROM_TOKENS = (0, 2, 3, 1), (0, 2, 1, 3)
TO_TOKENS = (0, 3, 1, 2), (0, 2, 1, 3)


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows and context of each slot, and the sizes of heads and pages."""

    rows: tuple[int, ...]
    lens: tuple[int, ...]
    N: int = 6
    K: int = 2
    H: int = 16
    Z: int = 16
    window: int = 0
    softcap: float = 0.0
    dtype: str = "float32"
    padding: int = 2
    sinks: bool = False


CASES = {
    "one_token": Case((1,), (1,), N=2, K=1, H=8),
    "decode": Case((1, 1, 1), (5, 300, 1000), N=9, K=3, H=64),
    "empty_slot": Case((1, 0, 7), (5, 99999, 300)),
    "mixed": Case((50, 1), (600, 20), N=9, K=3, H=64),
    "window": Case((50, 1), (600, 20), N=4, K=4, H=80, Z=48, window=16),
    "wide_window_and_cap": Case((50, 3), (600, 520), N=4, K=2, H=20, Z=64, window=270, softcap=3.0),
    "bfloat16_pages": Case((30, 1), (300, 40), N=16, K=1, H=128, Z=32, dtype="bfloat16"),
    "bfloat16_few_rows": Case(
        (1, 1, 2, 3, 1), (1, 17, 300, 64, 1000), N=3, K=1, H=80, dtype="bfloat16"
    ),
    "bfloat16_single_rows": Case(
        (1, 2), (500, 33), N=2, K=2, H=104, Z=32, window=100, dtype="bfloat16"
    ),
    "bfloat16_odd_head": Case((1, 1), (150, 9), N=5, K=1, H=13, dtype="bfloat16"),
    "widest_head": Case((2,), (30,), N=2, K=1, H=640),
    "odd_head": Case((9,), (70,), N=3, K=3, H=13),
    "sinks": Case((50, 1, 1), (600, 20, 1), N=9, K=3, H=20, sinks=True),
    "sinks_and_window": Case((20,), (600,), N=4, K=2, window=270, dtype="bfloat16", sinks=True),
}


def sinks_of(case: Case) -> jax.Array | None:
    """Below, among and above the scores."""
    return jnp.linspace(-3, 6, case.N, dtype=jnp.float32) if case.sinks else None


def inputs(case: Case, seed: int = 0) -> tuple[tuple[jax.Array, ...], Layout]:
    """q, k, v and pages; stale and unowned cells of the pages are NaN."""
    rng = np.random.default_rng(seed)
    S, T = len(case.rows), sum(case.rows) + case.padding
    live = [length if n else 0 for n, length in zip(case.rows, case.lens, strict=True)]
    M = max(-(-length // case.Z) for length in live) + 1
    P = S * M + 1
    table = (rng.permutation(P - 1)[: S * M].reshape(S, M) + 1).astype(np.int32)
    q, k, v = (
        rng.normal(size=(T, heads, case.H)).astype(np.float32) for heads in (case.N, case.K, case.K)
    )
    pages = np.full((2, P, case.Z, case.K, case.H), np.nan, np.float32)
    for s, length in enumerate(live):
        position = np.arange(length - case.rows[s])
        cells = table[s, position // case.Z], position % case.Z
        pages[:, *cells] = rng.normal(size=(2, len(position), case.K, case.H))
        first = max(0, length - case.rows[s] - case.window + 1) if case.window else 0
        table[s, : first // case.Z] = -1  # given up: must not be looked at
    start = np.concatenate([[0], np.cumsum(case.rows)]).astype(np.int32)
    layout = Layout(
        jnp.asarray(start),
        jnp.asarray(case.lens, jnp.int32),
        jnp.asarray(table),
        max(case.rows),
    )
    k_pages, v_pages = (
        jnp.asarray(part.transpose(axes), case.dtype)
        for part, axes in zip(pages, FROM_TOKENS, strict=True)
    )
    k, v = (np.asarray(jnp.asarray(part, case.dtype), np.float32) for part in (k, v))
    return (jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), k_pages, v_pages), layout


def expected(
    case: Case, arrays: tuple[jax.Array, ...], layout: Layout
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Output and pages, a row at a time in float64."""
    q, k, v, *pages = (np.array(x, np.float64) for x in arrays)
    k_pages, v_pages = (part.transpose(to) for part, to in zip(pages, TO_TOKENS, strict=True))
    start, table = np.asarray(layout.query_start), np.asarray(layout.page_table)
    sinks = [-np.inf] * case.N if sinks_of(case) is None else np.float64(sinks_of(case))
    out = np.zeros(q.shape)
    for s, (n, length) in enumerate(zip(case.rows, case.lens, strict=True)):
        for i in range(n):
            position = length - n + i
            cell = table[s, position // case.Z], position % case.Z
            k_pages[cell], v_pages[cell] = k[start[s] + i], v[start[s] + i]
        for i in range(n):
            last = length - n + i
            seen = np.arange(max(0, last - case.window + 1) if case.window else 0, last + 1)
            cells = table[s, seen // case.Z], seen % case.Z
            for head in range(case.N):
                kv = head // (case.N // case.K)
                scores = k_pages[cells][:, kv] @ q[start[s] + i, head] * case.H**-0.5
                if case.softcap:
                    scores = case.softcap * np.tanh(scores / case.softcap)
                weights = np.exp(scores - scores.max())
                total = weights.sum() + np.exp(sinks[head] - scores.max())
                out[start[s] + i, head] = weights @ v_pages[cells][:, kv] / total
    return out, *(x.transpose(to) for x, to in zip((k_pages, v_pages), FROM_TOKENS, strict=True))


def run(
    case: Case, arrays: tuple[jax.Array, ...], layout: Layout, **options: object
) -> tuple[jax.Array, ...]:
    settings = {"scale": case.H**-0.5, "window": case.window, "softcap": case.softcap}
    settings["sinks"] = sinks_of(case)
    return cpu.attention(*arrays, layout, **(settings | options))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str, isa: str) -> None:
    arrays, layout = inputs(CASES[name])
    want = expected(CASES[name], arrays, layout)
    got = run(CASES[name], arrays, layout, isa=isa)
    np.testing.assert_allclose(got[0], want[0], rtol=0, atol=3e-6)
    for pages, exact in zip(got[1:], want[1:], strict=True):
        np.testing.assert_array_equal(np.asarray(pages, np.float64), exact)


@pytest.mark.parametrize("name", CASES)
def test_rounded_queries_and_weights(name: str) -> None:
    """A query's element or a weight loses up to half a unit in the last place of bfloat16."""
    case = dataclasses.replace(CASES[name], dtype="bfloat16")
    arrays, layout = inputs(case)
    want = expected(case, arrays, layout)
    got = run(case, arrays, layout, rounded=True)
    values = np.abs(np.nan_to_num(want[2])).max()
    np.testing.assert_allclose(got[0], want[0], rtol=0, atol=2**-8 * values)
    assert np.abs(got[0] - want[0]).mean() < 1e-3


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("part", [2, 3])
def test_turned_on_the_way(part: int, isa: str) -> None:
    """Rotary embedding of all or two thirds of a head, against turning q and k beforehand."""
    case = CASES["mixed"]
    (q, k, v, *pages), layout = inputs(case)
    angles = np.random.default_rng(1).normal(0, 3, (q.shape[0], case.H // part))
    turn = jnp.cos(angles).astype(jnp.float32), jnp.sin(angles).astype(jnp.float32)
    want = run(case, (rotate(q, *turn), rotate(k, *turn), v, *pages), layout, isa=isa)
    got = run(case, (q, k, v, *pages), layout, turn=turn, isa=isa)
    rows = sum(case.rows)
    np.testing.assert_allclose(got[0][:rows], want[0][:rows], atol=1e-5)
    live = np.isfinite(np.asarray(want[1], np.float32))
    np.testing.assert_allclose(
        np.asarray(got[1], np.float32)[live], np.asarray(want[1], np.float32)[live], rtol=1e-2
    )
    with pytest.raises(StokerError, match="sines"):
        run(case, (q, k, v, *pages), layout, turn=(turn[0], turn[1][1:]))
    with pytest.raises(StokerError, match="cosines"):
        wide = jnp.ones((q.shape[0], case.H))
        run(case, (q, k, v, *pages), layout, turn=(wide, wide))


@pytest.mark.parametrize("name", ["decode", "mixed", "sinks", "sinks_and_window"])
def test_against_the_reference(name: str) -> None:
    arrays, layout = inputs(CASES[name])
    case = CASES[name]
    settings = {"scale": case.H**-0.5, "window": case.window, "sinks": sinks_of(case)}
    want = xla.attention(*arrays, layout, **settings)[0]
    got = run(CASES[name], arrays, layout)[0]
    rows = sum(CASES[name].rows)
    np.testing.assert_allclose(got[:rows], want[:rows], atol=1e-5)


@pytest.mark.parametrize("isa", [*ISAS, "rounded"])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("window", [0, 40, 300])
def test_bits_do_not_depend_on_chunks_slots_or_threads(
    window: int, softcap: float, isa: str
) -> None:
    """A prompt of 700 at once; in chunks; and beside another slot: the same bits for each row."""
    # Sinks in a third of the cases, which share no setting with another.
    sinks = (window, softcap) in ((0, 0.0), (40, 5.0))
    sizes = {"N": 6, "K": 2, "H": 32, "padding": 0, "sinks": sinks}
    options = {"rounded": True} if isa == "rounded" else {"isa": isa}
    if isa == "rounded" or softcap:
        sizes["dtype"] = "bfloat16"
    case = Case((700,), (700,), window=window, softcap=softcap, **sizes)
    (q, k, v, k_pages, v_pages), layout = inputs(case)
    whole = np.asarray(run(case, (q, k, v, k_pages, v_pages), layout, **options)[0])
    for sizes in ([699, 1], [1, 16, 17, 250, 416], [256, 256, 188]):
        for threads in (1, 0):
            pages, done, parts = (k_pages, v_pages), 0, []
            for n in sizes:
                beside = (jnp.concatenate([x[done : done + n], x[:1]]) for x in (q, k, v))
                # A second slot of one token, in the last page, which nobody else owns.
                table = jnp.stack([layout.page_table[0], jnp.full_like(layout.page_table[0], 0)])
                step = Layout(
                    jnp.asarray([0, n, n + 1], jnp.int32),
                    jnp.asarray([done + n, 1], jnp.int32),
                    table,
                    n,
                )
                out, *pages = run(case, (*beside, *pages), step, threads=threads, **options)
                parts.append(np.asarray(out)[:n])
                done += n
            np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_repeated_runs_give_the_same_bits() -> None:
    arrays, layout = inputs(CASES["decode"])
    first = np.asarray(run(CASES["decode"], arrays, layout)[0])
    for _ in range(50):
        np.testing.assert_array_equal(run(CASES["decode"], arrays, layout)[0], first)


def test_padding_rows_yield_zeros_and_write_nothing() -> None:
    arrays, layout = inputs(CASES["mixed"])
    out, k_pages, _ = run(CASES["mixed"], arrays, layout)
    np.testing.assert_array_equal(out[sum(CASES["mixed"].rows) :], 0)
    assert np.isnan(np.asarray(k_pages)[0]).all()


def test_donated_pages_are_updated_in_place() -> None:
    arrays, layout = inputs(CASES["decode"])
    step = jax.jit(lambda *a: run(CASES["decode"], a[:5], a[5]), donate_argnums=(3, 4))
    # Memory that numpy owns cannot be donated.
    own = [pages + 0 for pages in arrays[3:]]
    before = [pages.unsafe_buffer_pointer() for pages in own]
    _, *after = step(*arrays[:3], *own, layout)
    assert [pages.unsafe_buffer_pointer() for pages in after] == before


def test_pages_that_are_not_donated_stay_as_they_were() -> None:
    arrays, layout = inputs(CASES["decode"])
    before = np.array(arrays[3])
    jax.block_until_ready(jax.jit(lambda *a: run(CASES["decode"], a[:5], a[5]))(*arrays, layout))
    np.testing.assert_array_equal(arrays[3], before)


def test_under_scan() -> None:
    """Thirty decode steps in one scan equal one prefill."""
    case = Case((30,), (30,), padding=0)
    (q, k, v, *pages), layout = inputs(case)
    want, *filled = run(case, (q, k, v, *pages), layout)

    def step(pages: list[jax.Array], t: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        one = Layout(
            jnp.asarray([0, 1], jnp.int32), (t + 1)[None].astype(jnp.int32), layout.page_table
        )
        row = (jax.lax.dynamic_slice_in_dim(x, t, 1) for x in (q, k, v))
        out, *pages = run(case, (*row, *pages), one)
        return pages, out[0]

    decoded, got = jax.lax.scan(step, pages, jnp.arange(30))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(decoded[0], filled[0])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("page_table", [[1, 2, 999]], "page 999 of slot 0 is outside the pool of 5 pages"),
        ("page_table", [[1, -7, 2]], "page -7 of slot 0"),
        ("kv_lens", [49], "49 cached tokens; it needs at least its 4 rows and at most 48"),
        ("kv_lens", [3], "3 cached tokens"),
        ("kv_lens", [-2147483648], "cached tokens"),
        ("query_start", [0, 9], "owns rows 0:9 of 6"),
        ("query_start", [-1, 4], "owns rows -1:4"),
        ("query_start", [5, 2], "owns rows 5:2"),
    ],
)
def test_layouts_out_of_range_are_errors(field: str, value: list[object], message: str) -> None:
    case = Case((4,), (40,), padding=2)
    arrays, _ = inputs(case)
    layout = Layout(
        jnp.asarray([0, 4], jnp.int32),
        jnp.asarray([40], jnp.int32),
        jnp.asarray([[1, 2, 3]], jnp.int32),
    ).replace(**{field: jnp.asarray(value, jnp.int32)})
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(run(case, arrays, layout))


def test_wrong_arguments_are_named() -> None:
    case = Case((4,), (40,))
    (q, k, v, k_pages, v_pages), layout = inputs(case)
    with pytest.raises(StokerError, match=r"v of shape \[5, 2, 16\]"):
        run(case, (q, k, v[:-1], k_pages, v_pages), layout)
    with pytest.raises(StokerError, match=r"k_pages of shape \[5, 2, 8, 16\]"):
        run(case, (q, k, v, k_pages[:, :, :8], v_pages), layout)
    with pytest.raises(StokerError, match=r"v_pages of shape \[5, 2, 16, 8\]"):
        run(case, (q, k, v, k_pages, v_pages[..., :8]), layout)
    with pytest.raises(StokerError, match=r"pages of 8 tokens.* multiples of 16"):
        run(case, (q, k, v, k_pages[..., :8], v_pages[:, :, :8]), layout)
    with pytest.raises(StokerError, match="pages of float16"):
        run(case, (q, k, v, k_pages.astype("float16"), v_pages.astype("float16")), layout)
    with pytest.raises(StokerError, match=r"sinks of shape \[5\]; it must be \[6\]"):
        run(case, (q, k, v, k_pages, v_pages), layout, sinks=jnp.zeros(5))
    with pytest.raises(StokerError, match="sinks of int32"):
        run(case, (q, k, v, k_pages, v_pages), layout, sinks=jnp.zeros(6, jnp.int32))
    with pytest.raises(StokerError, match=r"layout.kv_lens is float32"):
        run(case, (q, k, v, k_pages, v_pages), layout.replace(kv_lens=jnp.ones(1)))
    with pytest.raises(StokerError, match="5 query heads, 2 KV heads"):
        run(case, (q[:, :5], k, v, k_pages, v_pages), layout)


@pytest.mark.parametrize("name", ragged.SHARED)
def test_parts_of_pages_make_up_the_whole(name: str) -> None:
    """By the kernels of each instruction set, on one thread too, and by the reference."""
    step = ragged.ragged_step(ragged.SHARED[name])
    options = {name: value for name, value in step.options.items() if name != "sinks"}
    kernels = [functools.partial(cpu.partial_attention, isa=isa) for isa in ISAS]
    one = functools.partial(cpu.partial_attention, threads=1)
    for kernel in (*kernels, one, xla.partial_attention):

        def part(share: jax.Array, *arrays: object, kernel: Callable[..., Any] = kernel) -> Any:
            return kernel(*arrays, share=share, shares=4, **options)

        ragged.check_shares(step, jax.jit(part), 4, 1e-5)


def test_handler_refuses_what_python_would_not_send() -> None:
    (q, k, v, k_pages, v_pages), layout = inputs(Case((4,), (40,)))
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k_pages, v_pages)]
    results.insert(1, jax.ShapeDtypeStruct((0, 0), jnp.float32))

    def call(aliases: dict[int, int], *arrays: jax.Array) -> None:
        function = jax.ffi.ffi_call("stoker_attention", results, input_output_aliases=aliases)
        attributes = {"window": np.int64(0), "softcap": np.float32(0), "scale": np.float32(1)}
        placement = {"isa": np.int64(0), "threads": np.int64(0)}
        attributes |= {"shares": np.int64(1), "rounded": np.bool_(False)}
        jax.block_until_ready(function(*arrays, **attributes, **placement))

    turn = (jnp.ones((len(q), 8)),) * 2
    tables = (layout.query_start, layout.kv_lens, layout.page_table, jnp.zeros(0))
    tables = (*tables, jnp.zeros(0, jnp.int32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="not one buffer"):
        call({}, q, k, v, *turn, k_pages, v_pages, *tables)
    with pytest.raises(jax.errors.JaxRuntimeError, match="shapes do not match"):
        call({5: 2, 6: 3}, q, k[:-1], v, *turn, k_pages, v_pages, *tables)
    with pytest.raises(jax.errors.JaxRuntimeError, match="shapes do not match"):
        wide = jnp.ones((len(q), q.shape[-1]))
        call({5: 2, 6: 3}, q, k, v, wide, wide, k_pages, v_pages, *tables)
    with pytest.raises(jax.errors.JaxRuntimeError, match="shapes do not match"):
        call({5: 2, 6: 3}, q, k, v, turn[0], turn[1][1:], k_pages, v_pages, *tables)
    with pytest.raises(jax.errors.JaxRuntimeError):
        call({5: 2, 6: 3}, q, k, v, *turn, k_pages, v_pages, *tables[:2], tables[2][0], *tables[3:])
    whole = tables[-1]
    with pytest.raises(jax.errors.JaxRuntimeError, match="shapes do not match"):
        call({5: 2, 6: 3}, q, k, v, *turn, k_pages, v_pages, *tables[:-1], jnp.ones(1, jnp.int32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="shapes do not match"):
        few = jnp.zeros(q.shape[1] - 1)
        call({5: 2, 6: 3}, q, k, v, *turn, k_pages, v_pages, *tables[:3], few, whole)
