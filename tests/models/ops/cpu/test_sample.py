"""The compiled draw: the same bits on every instruction set and thread, and what it refuses."""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampled import drawn_with, edited_rows

from stoker import StokerError
from stoker.models.ops import cpu

REFERENCE = importlib.import_module("stoker.models.ops.xla.sample")


def rows(count: int, width: int, seed: int = 0) -> list:
    """Arguments of `sample` that mix every filter, flat rows and peaked ones, ties and masks."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, rng.choice([0.1, 1, 3, 10], (count, 1)), (count, width))
    logits[::5] = np.round(logits[::5])
    logits[1::7] = np.where(rng.random((len(logits[1::7]), width)) < 0.5, -np.inf, logits[1::7])
    edits, history, positions = edited_rows(count, width, 30, seed)
    filters = drawn_with(
        count,
        width,
        rng.choice([0, 0.3, 1, 3], count),
        rng.choice([0, 1, 5, 50, 1000], count),
        rng.choice([0, 0.2, 0.9, 0.99, 1, 1], count),
        rng.choice([0, 0, 1e-3, 0.1, 1], count),
    )
    # Every third row is edited.
    kept = np.arange(count) % 3 > 0
    sampling = jax.tree.map(
        lambda plain, new: np.where(kept.reshape(-1, *[1] * (plain.ndim - 1)), plain, new),
        filters,
        edits,
    )
    names = ("temperature", "top_k", "top_p", "min_p")
    sampling = sampling.replace(**{name: getattr(filters, name) for name in names})
    slots = np.arange(count, dtype=np.int32)
    uniform = rng.random(count, np.float32)
    return [logits.astype(np.float32), sampling, history, slots, positions, uniform]


@pytest.mark.parametrize("width", [1, 7, 16, 100, 513, 5000, 49152])
def test_instruction_sets_and_threads_agree_bitwise(width: int) -> None:
    arguments = rows(70, width)
    want = cpu.sample(*arguments, isa="portable", threads=1)
    for isa in cpu.load().isas:
        for threads in (1, 2, 3):
            got = cpu.sample(*arguments, isa=isa, threads=threads)
            for one, other in zip(got, want, strict=True):
                np.testing.assert_array_equal(one, other)
            total = cpu.logsumexp(arguments[0], isa=isa, threads=threads)
            np.testing.assert_array_equal(total, want[1])
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
    nothing = np.zeros(2, np.int32)
    for temperature in (0.0, 1e-5, 1.0, 100.0):
        for top_k, top_p in ((0, 1.0), (2, 1.0), (2, 0.5), (0, 0.5)):
            tokens, total = cpu.sample(
                logits,
                drawn_with(2, 4, temperature, top_k, top_p, 0),
                nothing[:, None],
                np.arange(2, dtype=np.int32),
                nothing,
                np.full(2, 0.3, np.float32),
            )
            # Of four as likely, 0.3 falls on the second.
            assert tokens.tolist() == [3, 1 if temperature else 0]
            np.testing.assert_allclose(total, [3e38, -3e38], rtol=1e-6)


def test_shapes_and_types_are_checked() -> None:
    logits, sampling, *rest = jax.tree.map(jnp.asarray, rows(3, 40))
    with pytest.raises(StokerError, match=r"logits of float32 \[40\]; .* \[B, V\]"):
        cpu.sample(logits[0], sampling, *rest)
    with pytest.raises(StokerError, match=r"logits of bfloat16"):
        cpu.sample(logits.astype(jnp.bfloat16), sampling, *rest)
    with pytest.raises(StokerError, match=r"top_k of float32 \[3\]; it must be int32 \[3\]"):
        cpu.sample(logits, sampling.replace(top_k=sampling.min_p), *rest)
    with pytest.raises(StokerError, match=r"min_lens of int32 \[2\]; it must be int32 \[3\]"):
        cpu.sample(logits, sampling.replace(min_lens=sampling.min_lens[:2]), *rest)
    with pytest.raises(StokerError, match=r"bias_values of float32 \[3, 4\]; .* \[3, 5\]"):
        cpu.sample(logits, sampling.replace(bias_values=sampling.bias_values[:, :4]), *rest)
    with pytest.raises(StokerError, match=r"allowed of uint32 \[3, 1\]; .* uint32 \[3, 2\]"):
        cpu.sample(logits, sampling.replace(allowed=sampling.allowed[:, :1]), *rest)
    with pytest.raises(StokerError, match=r"history of int32 \[3\]"):
        cpu.sample(logits, sampling, rest[0][:, 0], *rest[1:])
    with pytest.raises(StokerError, match=r"uniform of float32 \[2\]"):
        cpu.sample(logits, sampling, *rest[:3], rest[3][:2])
    with pytest.raises(StokerError, match=r"logits of float32 \[40\]"):
        cpu.logsumexp(logits[0])
    with pytest.raises(StokerError, match=r"wanted of float32 \[3\]"):
        cpu.largest(logits, sampling.min_p, 4)
