"""The compiled draw: the same bits on every instruction set and thread, and what it refuses."""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stoker import StokerError
from stoker.models.ops import cpu

REFERENCE = importlib.import_module("stoker.models.ops.xla.sample")


def rows(count: int, width: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Arguments of `sample` that mix every filter, flat rows and peaked ones, ties and masks."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, rng.choice([0.1, 1, 3, 10], (count, 1)), (count, width))
    logits[::5] = np.round(logits[::5])
    logits[1::7] = np.where(rng.random((len(logits[1::7]), width)) < 0.5, -np.inf, logits[1::7])
    return (
        logits.astype(np.float32),
        rng.choice([0, 0.3, 1, 3], count).astype(np.float32),
        rng.choice([0, 1, 5, 50, 1000], count).astype(np.int32),
        rng.choice([0, 0.2, 0.9, 0.99, 1, 1], count).astype(np.float32),
        rng.choice([0, 0, 1e-3, 0.1, 1], count).astype(np.float32),
        rng.random(count, np.float32),
    )


@pytest.mark.parametrize("width", [1, 7, 16, 100, 513, 5000, 49152])
def test_instruction_sets_and_threads_agree_bitwise(width: int) -> None:
    arguments = rows(70, width)
    want = cpu.sample(*arguments, isa="portable", threads=1)
    for isa in cpu.load().isas:
        for threads in (1, 2, 3):
            got = cpu.sample(*arguments, isa=isa, threads=threads)
            for one, other in zip(got, want, strict=True):
                np.testing.assert_array_equal(one, other)
    wanted = np.arange(70) % 3 > 0
    want = cpu.largest(arguments[0], wanted, 20, isa="portable", threads=1)
    for isa in cpu.load().isas:
        for one, other in zip(cpu.largest(arguments[0], wanted, 20, isa=isa), want, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("width", [100, 5000])
def test_the_reference_draws_the_same(width: int) -> None:
    """All but a token in five hundred, where a sum falls on the other side of its share."""
    arguments = rows(500, width, seed=1)
    tokens, total = cpu.sample(*arguments)
    other_tokens, other_total = jax.jit(REFERENCE.sample)(*arguments)
    assert (np.asarray(tokens) != np.asarray(other_tokens)).sum() <= 1
    np.testing.assert_allclose(total, other_total, rtol=3e-7, atol=3e-6)


def test_subnormal_and_huge_logits() -> None:
    logits = np.array([[1e-40, 0, -1e-40, 3e38], [-3e38, -3e38, -3e38, -3e38]], np.float32)
    column = np.ones(2, np.float32)
    for temperature in (0.0, 1e-5, 1.0, 100.0):
        for top_k, top_p in ((0, 1.0), (2, 1.0), (2, 0.5), (0, 0.5)):
            tokens, total = cpu.sample(
                logits,
                column * np.float32(temperature),
                np.full(2, top_k, np.int32),
                column * np.float32(top_p),
                column * 0,
                column * np.float32(0.3),
            )
            # Of four as likely, 0.3 falls on the second.
            assert tokens.tolist() == [3, 1 if temperature else 0]
            np.testing.assert_allclose(total, [3e38, -3e38], rtol=1e-6)


def test_shapes_and_types_are_checked() -> None:
    arguments = list(map(jnp.asarray, rows(3, 20)))
    with pytest.raises(StokerError, match=r"logits of float32 \[20\]; .* \[B, V\]"):
        cpu.sample(arguments[0][0], *arguments[1:])
    with pytest.raises(StokerError, match=r"logits of bfloat16"):
        cpu.sample(arguments[0].astype(jnp.bfloat16), *arguments[1:])
    with pytest.raises(StokerError, match=r"top_k of float32 \[3\]; it must be int32 \[3\]"):
        cpu.sample(arguments[0], arguments[1], arguments[1], *arguments[3:])
    with pytest.raises(StokerError, match=r"uniform of float32 \[2\]"):
        cpu.sample(*arguments[:5], arguments[5][:2])
    with pytest.raises(StokerError, match=r"wanted of float32 \[3\]"):
        cpu.largest(arguments[0], arguments[1], 4)
