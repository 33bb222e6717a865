"""Latent attention over pages against keys and values expanded for each head, in NumPy."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from stoker.models import ops
from stoker.models.config import Kernels
from stoker.models.ops import cpu, xla
from stoker.models.ops.layout import Layout

R, ROPE, N, Z, M = 24, 8, 4, 16, 12
RNG = np.random.default_rng(0)
#: What kernels are compared on beside `(N, R, ROPE, Z)` above: every number of heads, width, page
#: and type that matters, in few steps. The last is DeepSeek's own width.
GRID = {
    "many_heads": ((128, 24, 8, 16), [1, 0, 1], [40, 9, 0], "float32"),
    "odd_heads": ((6, 32, 16, 128), [3, 1], [130, 200], "float32"),
    "heads_and_rows": ((16, 24, 8, 64), [0, 9, 1], [0, 60, 5], "bfloat16"),
    "float8": ((16, 32, 16, 32), [1, 2], [70, 1], "float8_e4m3fn"),
    "real": ((16, 512, 64, 16), [1, 2], [33, 0], "bfloat16"),
}


def expanded(q: np.ndarray, latents: np.ndarray, scale: float) -> np.ndarray:
    """One row `q [N, W]` over all of `latents [C, W]`: attention as it is defined, in float64."""
    scores = np.einsum("nw,cw->nc", q, latents) * scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("nc,cr->nr", weights, latents[:, :R])


def case(rows: list[int], cached: list[int], padding: int, sizes=(N, R, ROPE, Z), dtype="float32"):
    """Slots with so many new rows on so many cached tokens, on scattered pages full of NaN.

    Numbers are such as `dtype` holds.
    """
    N, R, ROPE, Z = sizes
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
    at = 0
    for s, history in enumerate(histories):
        for r in range(rows[s]):
            want = expanded(q[at], history[: cached[s] + r + 1], 0.3)
            np.testing.assert_allclose(out[at], want, atol=2e-5)
            at += 1
        for p, vector in enumerate(history):
            page = int(layout.page_table[s, p // Z])
            np.testing.assert_allclose(after[page, p % Z], vector, rtol=1e-6)
    # Nothing but the slots' own tokens was written, padding aside.
    written = sum(map(len, histories))
    assert np.isfinite(np.asarray(after[1:])).all(-1).sum() == written


def test_a_row_past_its_pages_is_not_a_number_and_writes_nothing() -> None:
    q, latent, pages, layout, _ = case([1, 1], [M * Z - 1, 5], 0)
    layout = dataclasses.replace(layout, kv_lens=jnp.array([M * Z + 1, 6], jnp.int32))
    arrays = (jnp.float32(q), jnp.float32(latent), jnp.asarray(pages))
    out, after = xla.latent_attention(*arrays, layout, rank=R, scale=0.3)
    assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()
    own = np.asarray(layout.page_table[0])
    np.testing.assert_array_equal(after[own], pages[own])


def test_heads_meet_their_own_matrix() -> None:
    x, weight = RNG.normal(size=(3, N, 5)), RNG.normal(size=(N, 7, 5))
    got = ops.head_matmul(jnp.float32(x), jnp.float32(weight), Kernels())
    want = np.stack([x[:, n] @ weight[n].T for n in range(N)], axis=1)
    np.testing.assert_allclose(got, want, atol=1e-5)
