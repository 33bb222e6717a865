"""Latent attention over pages against keys and values expanded for each head, in NumPy."""

from __future__ import annotations

import dataclasses
import functools

import interpreted
import jax.numpy as jnp
import numpy as np
import pytest
from ragged import joined

from stoker.models import ops
from stoker.models.config import Kernels
from stoker.models.ops import cpu, gpu, tpu, xla
from stoker.models.ops.layout import Layout

R, ROPE, N, Z, M = 24, 8, 4, 16, 12
RNG = np.random.default_rng(0)
#: What the Pallas kernels are compared on: heads, R, ROPE, Z and M; rows and cached tokens of each
#: slot; and the type of pages. The last has DeepSeek's own widths.
GRID = {
    "many_heads": ((128, 24, 8, 16, 3), [1, 0, 1], [40, 9, 0], "float8_e4m3fn"),
    "odd_heads": ((6, 32, 16, 128, 2), [3, 1], [130, 200], "float32"),
    "mixed": ((16, 24, 8, 64, 2), [0, 9, 1], [0, 60, 5], "bfloat16"),
    "real": ((16, 512, 64, 16, 3), [1], [33], "bfloat16"),
}
PALLAS = {
    "tpu": functools.partial(tpu.latent_attention, interpret=True),
    "gpu": functools.partial(gpu.latent_attention, interpret=True),
}


def expanded(q: np.ndarray, latents: np.ndarray, scale: float, rank: int = R) -> np.ndarray:
    """One row `q [N, W]` over all of `latents [C, W]`: attention as it is defined, in float64."""
    scores = np.einsum("nw,cw->nc", q, latents) * scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("nc,cr->nr", weights, latents[:, :rank])


def case(
    rows: list[int], cached: list[int], padding: int, sizes=(N, R, ROPE, Z, M), dtype="float32"
):
    """Slots with so many new rows on so many cached tokens, on scattered pages full of NaN.

    Numbers are such as `dtype` holds.
    """
    N, R, ROPE, Z, M = sizes
    S, T = len(rows), sum(rows) + padding
    table = (1 + RNG.permutation(S * M)).reshape(S, M).astype(np.int32)
    pages = np.full((1 + S * M, Z, R + ROPE), np.nan, np.float32)
    pages[0] = 0

    def normal(*shape: int) -> np.ndarray:
        return np.asarray(jnp.asarray(RNG.normal(size=shape), dtype), np.float64)

    histories = [normal(c + r, R + ROPE) for c, r in zip(cached, rows, strict=True)]
    for s, history in enumerate(histories):
        for p in range(cached[s]):
            pages[table[s, p // Z], p % Z] = history[p]
    q = normal(T, N, R + ROPE)
    new = [history[c:] for history, c in zip(histories, cached, strict=True)]
    latent = np.concatenate([*new, np.ones((padding, R + ROPE))])
    layout = Layout(
        query_start=jnp.asarray(np.cumsum([0, *rows]), jnp.int32),
        kv_lens=jnp.asarray(np.add(cached, rows), jnp.int32),
        page_table=jnp.asarray(table),
        max_query=max(rows),
    )
    return q, latent, pages, layout, histories


LIBRARY = cpu.load()
assert LIBRARY is not None, cpu.why_unavailable()
IMPLEMENTATIONS = {
    "xla": xla.latent_attention,
    **{isa: functools.partial(cpu.latent_attention, isa=isa) for isa in LIBRARY.isas},
}


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("rows", "cached", "padding"),
    [([1, 1, 1], [0, 17, 150], 0), ([5, 1, 0, 33], [0, 140, 3, 15], 6), ([70], [100], 2)],
)
def test_rows_equal_expanded_attention(name, rows, cached, padding) -> None:
    q, latent, pages, layout, histories = case(rows, cached, padding)
    arrays = (jnp.float32(q), jnp.float32(latent), jnp.asarray(pages))
    out, after = IMPLEMENTATIONS[name](*arrays, layout, rank=R, scale=0.3)
    check(out, after, q, layout, histories, 0.3)


def check(out, after, q, layout, histories, scale, rank=R, tolerance=2e-5) -> None:
    """Raises AssertionError unless output and pages are as expected."""
    out, after = np.asarray(out, np.float64), np.asarray(after, np.float64)
    starts = np.asarray(layout.query_start)
    for s, history in enumerate(histories):
        first = len(history) - (starts[s + 1] - starts[s])
        for at in range(starts[s], starts[s + 1]):
            want = expanded(q[at], history[: first + at - starts[s] + 1], scale, rank)
            np.testing.assert_allclose(out[at], want, rtol=tolerance, atol=tolerance)
        for p, vector in enumerate(history):
            page = int(layout.page_table[s, p // after.shape[1]])
            held = after[page, p % after.shape[1]]
            np.testing.assert_allclose(held[: len(vector)], vector, rtol=1e-6)
            assert not held[len(vector) :].any()
    # Nothing but the slots' own tokens was written, padding aside.
    written = sum(map(len, histories))
    assert np.isfinite(after[1:]).all(-1).sum() == written


@pytest.mark.parametrize("platform", PALLAS)
@pytest.mark.parametrize("name", GRID)
def test_pallas_kernels_equal_expanded_attention(name: str, platform: str) -> None:
    sizes, rows, cached, dtype = GRID[name]
    q, latent, pages, layout, histories = case(rows, cached, 3, sizes, dtype)
    if platform == "tpu":
        # Whole lanes, of which the last hold zeros.
        pages = np.pad(pages, ((0, 0), (0, 0), (0, -pages.shape[2] % 128)))
    work = "float32" if dtype == "float32" else "bfloat16"
    arrays = (jnp.asarray(q, work), jnp.asarray(latent, work), jnp.asarray(pages, dtype))
    scale = (sizes[1] + sizes[2]) ** -0.5
    attend = functools.partial(PALLAS[platform], rank=sizes[1], scale=scale)
    out, after = interpreted.run(attend, *arrays, layout)
    check(out, after, q, layout, histories, scale, sizes[1], 2e-5 if dtype == "float32" else 2e-2)
    assert not np.asarray(out, np.float32)[sum(rows) :].any()


@pytest.mark.parametrize("name", ["xla", "tpu", "gpu"])
def test_parts_of_pages_make_up_the_whole(name: str) -> None:
    """Four parts of each page, of which some rows see nothing."""
    package = {"xla": xla, "tpu": tpu, "gpu": gpu}[name]
    options = {"interpret": True} if name in PALLAS else {}
    q, latent, pages, layout, histories = case([1, 5, 0], [70, 3, 9], 1, (N, R, ROPE, 64, 2))

    def part(share, *arrays):
        attend = package.partial_latent_attention
        return attend(*arrays, share=share, shares=4, rank=R, scale=0.3, **options)

    attend = interpreted.jitted(part)
    found = [
        attend(jnp.int32(share), jnp.float32(q), jnp.float32(latent), held, layout)
        for share, held in enumerate(jnp.split(jnp.asarray(pages), 4, axis=1))
    ]
    outs, sums, after = zip(*found, strict=True)
    whole = joined(outs, sums)
    check(whole, np.concatenate(after, axis=1), q, layout, histories, 0.3)


@pytest.mark.parametrize("platform", ["xla", "gpu"])
def test_a_row_past_its_pages_is_not_a_number_and_writes_nothing(platform: str) -> None:
    q, latent, pages, layout, _ = case([1, 1], [M * Z - 1, 5], 0)
    layout = dataclasses.replace(layout, kv_lens=jnp.array([M * Z + 1, 6], jnp.int32))
    arrays = (jnp.float32(q), jnp.float32(latent), jnp.asarray(pages))
    attend = functools.partial((PALLAS | IMPLEMENTATIONS)[platform], rank=R, scale=0.3)
    out, after = interpreted.run(attend, *arrays, layout)
    assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()
    own = np.asarray(layout.page_table[0])
    np.testing.assert_array_equal(after[own], pages[own])


def test_heads_meet_their_own_matrix() -> None:
    x, weight = RNG.normal(size=(3, N, 5)), RNG.normal(size=(N, 7, 5))
    got = ops.head_matmul(jnp.float32(x), jnp.float32(weight), Kernels())
    want = np.stack([x[:, n] @ weight[n].T for n in range(N)], axis=1)
    np.testing.assert_allclose(got, want, atol=1e-5)
