"""Ragged steps over random pages, and their attention in float64, a row at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from stoker.models.ops import Layout
from stoker.models.ops.partial import NOTHING
from stoker.models.ops.quant_pages import Pages, QuantPages, widen

#: Axes that turn pages [P, Z, K, H] into [P, K, H, Z] and [P, K, Z, H].
KEYS, VALUES = (0, 2, 3, 1), (0, 2, 1, 3)


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows and context of each slot, sizes, and types; `pages` may be "int8".

    Values are `[P, K, Z, H]`, or laid out as keys where not `by_token`.
    """

    rows: tuple[int, ...]
    lens: tuple[int, ...]
    N: int = 6
    K: int = 2
    H: int = 16
    Z: int = 16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    dtype: str = "float32"
    pages: str = "float32"
    padding: int = 2
    by_token: bool = True

    @property
    def axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Axes that turn key and value pages `[P, Z, K, H]` into what the kernels take."""
        return KEYS, VALUES if self.by_token else KEYS


@dataclasses.dataclass(frozen=True)
class Step:
    """What attention takes, and what it should give."""

    arrays: tuple[Any, ...]
    layout: Layout
    options: dict[str, Any]
    expected: np.ndarray
    k_cells: np.ndarray
    v_cells: np.ndarray
    live: np.ndarray
    axes: tuple[tuple[int, ...], tuple[int, ...]]


def ragged_step(case: Case, seed: int = 0) -> Step:
    """A random step; stale and unowned cells of the pages are NaN (codes: scales are).

    `expected` is float64 `[T, N, H]`, from what the pages hold after rounding; `k_cells` and
    `v_cells` are that, float64 `[P, Z, K, H]`; `live` bool `[P, Z]` tells which cells matter.
    """
    rng = np.random.default_rng(seed)
    S, T = len(case.rows), sum(case.rows) + case.padding
    live_lens = [length if n else 0 for n, length in zip(case.rows, case.lens, strict=True)]
    M = max(-(-length // case.Z) for length in live_lens) + 1
    P = S * M + 1
    table = (rng.permutation(P - 1)[: S * M].reshape(S, M) + 1).astype(np.int32)
    q, k, v = (
        rng.normal(size=(T, heads, case.H)).astype(np.float32) for heads in (case.N, case.K, case.K)
    )
    q, k, v = (np.asarray(jnp.asarray(x, case.dtype)) for x in (q, k, v))
    start = np.concatenate([[0], np.cumsum(case.rows)]).astype(np.int32)
    cells = np.full((2, P, case.Z, case.K, case.H), np.nan, np.float32)
    live = np.zeros((P, case.Z), bool)
    after = cells.copy()
    for s, length in enumerate(live_lens):
        position = np.arange(length)
        where = table[s, position // case.Z], position % case.Z
        live[where] = True
        old = length - case.rows[s]
        before = tuple(x[:old] for x in where)
        cells[:, *before] = rng.normal(size=(2, old, case.K, case.H))
        after[:, *before] = cells[:, *before]
        new = tuple(x[old:] for x in where)
        own = slice(start[s], start[s + 1])
        after[0][new], after[1][new] = k[own], v[own]
        first = max(0, old - case.window + 1) if case.window else 0
        table[s, : first // case.Z] = -1  # given up: must not be looked at
    pools = tuple(
        _pages(part, axes, case.pages) for part, axes in zip(cells, case.axes, strict=True)
    )
    k_cells, v_cells = (
        stored(_pages(part, axes, case.pages), axes)
        for part, axes in zip(after, case.axes, strict=True)
    )
    sinks = rng.normal(size=case.N).astype(np.float32) if case.sinks else None
    expected = np.zeros(q.shape)
    for s, n in enumerate(case.rows):
        for i in range(n):
            last = case.lens[s] - n + i
            seen = np.arange(max(0, last - case.window + 1) if case.window else 0, last + 1)
            where = table[s, seen // case.Z], seen % case.Z
            for head in range(case.N):
                kv = head // (case.N // case.K)
                query = q[start[s] + i, head].astype(np.float64)
                scores = k_cells[where][:, kv] @ query * case.H**-0.5
                if case.softcap:
                    scores = case.softcap * np.tanh(scores / case.softcap)
                extra = [] if sinks is None else [sinks[head]]
                peak = max([scores.max(), *extra])
                weights = np.exp(scores - peak)
                total = weights.sum() + sum(np.exp(x - peak) for x in extra)
                expected[start[s] + i, head] = weights @ v_cells[where][:, kv] / total
    layout = Layout(
        jnp.asarray(start), jnp.asarray(case.lens, jnp.int32), jnp.asarray(table), max(case.rows)
    )
    options: dict[str, Any] = {"scale": case.H**-0.5, "window": case.window}
    options |= {"softcap": case.softcap}
    if sinks is not None:
        options["sinks"] = jnp.asarray(sinks)
    arrays = (*(jnp.asarray(x) for x in (q, k, v)), *pools)
    return Step(arrays, layout, options, expected, k_cells, v_cells, live, case.axes)


def stored(pages: Pages, axes: tuple[int, ...]) -> np.ndarray:
    """What pages of those axes stand for, float64 `[P, Z, K, H]`."""
    wide = widen(pages, 2 if axes == KEYS else 3)
    return np.asarray(wide, np.float64).transpose(np.argsort(axes))


def _pages(cells: np.ndarray, axes: tuple[int, ...], kind: str) -> Pages:
    """Cells `[P, Z, K, H]` in pages: rounded to a float type, or to codes by this rule alone."""
    if kind != "int8":
        narrow = cells.astype(ml_dtypes.bfloat16 if kind == "bfloat16" else np.dtype(kind))
        return jnp.asarray(narrow.transpose(axes))
    scale = np.abs(cells).max(-1) / np.float32(127)
    codes = np.nan_to_num(np.round(cells / np.where(scale > 0, scale, 1)[..., None]))
    return QuantPages(
        jnp.asarray(codes.astype(np.int8).transpose(axes)),
        jnp.asarray(scale.transpose(0, 2, 1).astype(np.float32)),
    )


def check(step: Step, result: tuple[jax.Array, Pages, Pages], tolerance: float) -> None:
    """Raises AssertionError unless output and pages are as expected."""
    out, k_pages, v_pages = result
    n = int(np.asarray(step.layout.query_start)[-1])
    out = np.asarray(out, np.float64)
    np.testing.assert_allclose(out[:n], step.expected[:n], rtol=tolerance, atol=tolerance)
    assert not out[n:].any()
    cells = (step.k_cells, step.v_cells)
    # Scales are quotients, which compilers may compute as products with a reciprocal.
    rounding = 1e-6 if isinstance(k_pages, QuantPages) else 0
    for pages, axes, wanted in zip((k_pages, v_pages), step.axes, cells, strict=True):
        np.testing.assert_allclose(
            stored(pages, axes)[step.live], wanted[step.live], rtol=rounding, atol=0
        )


def check_shares(step: Step, attend: Callable[..., Any], shares: int, tolerance: float) -> None:
    """Raises AssertionError unless `shares` parts of each page make up output and pages.

    `attend` takes which part it is, int32, and what a `partial_attention` takes first.
    """
    # Scales are [P, K, Z]; keys [P, K, H, Z], values perhaps [P, K, Z, H].
    axes = [2 if axes == VALUES else 3 for axes in step.axes]
    cut = [
        jax.tree.map(lambda x, axis=axis: jnp.split(x, shares, min(axis, x.ndim - 1)), pages)
        for pages, axis in zip(step.arrays[3:], axes, strict=True)
    ]
    outs, sums, after = [], [], []
    for share in range(shares):
        pools = (
            jax.tree.map(lambda parts, share=share: parts[share], pages, is_leaf=_is_list)
            for pages in cut
        )
        out, lse, *pools = attend(jnp.int32(share), *step.arrays[:3], *pools, step.layout)
        outs.append(out)
        sums.append(lse)
        after.append(pools)
    whole = joined(outs, sums, step.options.get("sinks", -np.inf))
    whole[int(step.layout.query_start[-1]) :] = 0  # padding means nothing
    pools = (
        jax.tree.map(lambda *x, axis=axis: jnp.concatenate(x, min(axis, x[0].ndim - 1)), *parts)
        for parts, axis in zip(zip(*after, strict=True), axes, strict=True)
    )
    check(step, (whole, *pools), tolerance)


def joined(outs: Sequence[Any], sums: Sequence[Any], sinks: Any = -np.inf) -> np.ndarray:
    """The attention, float64, that parts `[T, N, H]` with logarithms of sums `[T, N]` make up."""
    lse, sinks = np.asarray(sums, np.float64), np.float64(sinks)
    # Where a row sees nothing, its output means nothing.
    parts = np.where(lse[..., None] > NOTHING / 2, np.asarray(outs, np.float64), 0)
    peak = np.maximum(lse.max(axis=0), sinks)
    weights = np.exp(lse - peak)[..., None]
    return (parts * weights).sum(axis=0) / (weights.sum(axis=0) + np.exp(sinks - peak)[..., None])


def _is_list(node: Any) -> bool:
    return isinstance(node, list)


#: What both Pallas attentions are compared on: every group size, head width, page size, feature and
#: page type that matters, in few steps. Slots without rows have meaningless lengths.
GRID = {
    "one_token": Case((1,), (1,), N=1, K=1, H=64, padding=0),
    "decode": Case((1, 1, 1, 1), (5, 300, 1, 16), N=9, K=3, H=64),
    "empty_slots": Case((0, 1, 0, 3), (9999, 40, 0, 3), N=4, K=4, H=80, Z=32),
    "mixed": Case((40, 1, 0, 5, 1), (90, 20, 9999, 5, 1), N=8, K=1, H=96, Z=16),
    "group_of_16": Case((20, 1), (52, 33), N=32, K=2, H=128, Z=16),
    "many_kv_heads": Case((2, 1), (20, 5), N=9, K=9, H=64, Z=16),
    "wide_head": Case((1, 7), (100, 7), N=2, K=1, H=256, Z=128),
    "window": Case((30, 1, 1), (200, 90, 3), N=4, K=2, H=64, Z=16, window=20),
    "window_of_one": Case((3, 1), (35, 33), N=2, K=2, H=64, Z=16, window=1),
    "cap_and_sinks": Case((9, 1), (60, 31), N=6, K=2, H=64, Z=32, softcap=2.0, sinks=True),
    "window_and_sinks": Case((1, 1), (90, 2), N=4, K=1, H=64, Z=16, window=40, sinks=True),
    "bfloat16": Case((18, 1), (70, 30), N=8, K=2, H=128, Z=32, dtype="bfloat16", pages="bfloat16"),
    "int8_decode": Case((1, 1), (70, 31), N=4, K=2, H=64, Z=32, pages="int8"),
    "int8_prompt": Case((33, 1), (64, 40), N=4, K=1, H=80, Z=64, pages="int8", window=30),
    "float8": Case((5, 1), (64, 33), N=4, K=2, H=64, Z=32, pages="float8_e4m3fn"),
}
#: Largest error beside float64, relative and absolute. Float32 operands are multiplied exactly;
#: bfloat16 ones leave the rounding of softmax weights (2**-9 of each) and of the output.
TOLERANCES = {"float32": 2e-5, "bfloat16": 2e-2}
#: Steps whose pages are cut in four: rows that see nothing of a part, at its first and last token,
#: windows over pages given up, and prompts that fill several pages.
SHARED = {
    "mixed": Case((70, 1, 1, 0, 1), (150, 17, 64, 9, 3), N=4, K=2, Z=64, sinks=True, softcap=3.0),
    "window": Case((33, 1, 1, 0, 1), (230, 145, 64, 9, 3), N=4, K=2, Z=64, sinks=True, window=40),
}
