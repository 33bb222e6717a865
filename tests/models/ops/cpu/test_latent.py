"""Latent attention by the compiled kernels: widths as published, the same bits always, refusals."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stoker.models import ops
from stoker.models.config import Kernels
from stoker.models.errors import StokerError
from stoker.models.ops import Layout, cpu, xla

LIBRARY = cpu.load()
assert LIBRARY is not None, cpu.why_unavailable()
R, W, N, Z, M = 512, 576, 16, 16, 20
RNG = np.random.default_rng(4)


def inputs(rows: list[int], lens: list[int], dtype: str = "bfloat16"):
    """q, latent vectors, pages and layout; what no slot owns yet is not a number."""
    S, T = len(rows), sum(rows)
    table = (1 + RNG.permutation(S * M)).reshape(S, M).astype(np.int32)
    pages = np.full((1 + S * M, Z, W), np.nan, np.float32)
    for s, (count, length) in enumerate(zip(rows, lens, strict=True)):
        position = np.arange(length - count)
        pages[table[s, position // Z], position % Z] = RNG.normal(size=(len(position), W))
    q, latent = RNG.normal(size=(T, N, W)), RNG.normal(size=(T, W))
    layout = Layout(
        jnp.asarray(np.cumsum([0, *rows]), jnp.int32),
        jnp.asarray(lens, jnp.int32),
        jnp.asarray(table),
        max(rows),
    )
    return (jnp.float32(q), jnp.float32(latent), jnp.asarray(pages, dtype)), layout


def run(arrays, layout, **options):
    return cpu.latent_attention(*arrays, layout, rank=R, scale=W**-0.5, **options)


@pytest.mark.parametrize("isa", LIBRARY.isas)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_published_widths_equal_the_reference(isa: str, dtype: str) -> None:
    arrays, layout = inputs([1, 30, 1], [300, 290, 1], dtype)
    want, pages = xla.latent_attention(*arrays, layout, rank=R, scale=W**-0.5)
    got, after = run(arrays, layout, isa=isa)
    np.testing.assert_allclose(got, want, atol=2e-5)
    np.testing.assert_array_equal(jnp.float32(after[1:]), jnp.float32(pages[1:]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norm_and_rotation_come_first(dtype: str) -> None:
    """Both implementations, given rows as the projections make them."""
    (q, latent, pages), layout = inputs([3, 1], [20, 40], dtype)
    angles = RNG.uniform(0, 6, (4, (W - R) // 2))
    turn = jnp.float32(np.cos(angles)), jnp.float32(np.sin(angles))
    norm = jnp.float32(RNG.normal(1, 0.3, R)), 1e-6
    want, got = (
        ops.latent_attention(
            *(q, latent, pages, layout, kernels), norm=norm, turn=turn, rank=R, scale=W**-0.5
        )
        for kernels in (Kernels("xla"), Kernels("cpu"))
    )
    np.testing.assert_allclose(got[0], want[0], atol=2e-5 if dtype == "float32" else 2e-3)
    after, expected = (jnp.float32(pages[1:]) for _, pages in (got, want))
    np.testing.assert_allclose(after, expected, rtol=1e-5 if dtype == "float32" else 1e-2)
    plain, _ = run((q, latent, pages), layout)
    assert np.abs(plain - want[0]).max() > 0.01


@pytest.mark.parametrize("isa", LIBRARY.isas)
def test_a_row_has_the_same_bits_in_any_company(isa: str) -> None:
    """A prompt in one chunk, beside another, and its last row alone; on one and more threads."""
    arrays, layout = inputs([40, 3], [300, 17])
    whole, pages = run(arrays, layout, isa=isa)
    threads, _ = run(arrays, layout, isa=isa, threads=1)
    np.testing.assert_array_equal(whole, threads)
    q, latent, _ = arrays
    for count in (1, 7):
        part = Layout(
            jnp.array([0, count], jnp.int32),
            layout.kv_lens[:1],
            layout.page_table[:1],
            count,
        )
        rows = slice(40 - count, 40)
        got, after = run((q[rows], latent[rows], pages), part, isa=isa)
        np.testing.assert_array_equal(got, whole[rows])
        np.testing.assert_array_equal(jnp.float32(after), jnp.float32(pages))


def test_donated_pages_stay_where_they_are() -> None:
    arrays, layout = inputs([1], [5])
    step = jax.jit(lambda pages: run((*arrays[:2], pages), layout), donate_argnums=0)
    pages = jnp.array(arrays[2])
    before = pages.unsafe_buffer_pointer()
    _, after = step(pages)
    assert after.unsafe_buffer_pointer() == before


def test_what_does_not_fit_is_refused() -> None:
    (q, latent, pages), layout = inputs([1], [5])
    wrong = [
        ((q[0], latent, pages), layout, "these need 3, 3 and 2 axes"),
        ((q, latent[:, 1:], pages), layout, "latent of shape"),
        ((q, latent, pages[:, :7]), layout, "pages of 7 tokens"),
        ((q, latent, pages.astype(jnp.float16)), layout, "pages of float16"),
        ((q[:, :0], latent, pages), layout, "got 0 heads"),
        (
            (q, latent, pages),
            dataclasses.replace(layout, kv_lens=layout.kv_lens.astype(jnp.float32)),
            "layout.kv_lens is float32",
        ),
    ]
    for arrays, places, said in wrong:
        with pytest.raises(StokerError, match=said):
            run(arrays, places)
    late = dataclasses.replace(layout, kv_lens=jnp.array([M * Z + 1], jnp.int32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="321 cached tokens"):
        jax.block_until_ready(run((q, latent, pages), late))
