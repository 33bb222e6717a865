"""Rows of `Sampling` made directly, for tests of the kernels."""

from __future__ import annotations

import dataclasses

import numpy as np

from stoker.models.ops import Sampling

#: Most biases and end ids of a row, here.
BIASES, ENDS = 5, 3


def drawn_with(rows: int, width: int, temperature, top_k, top_p, min_p) -> Sampling:
    """Rows that edit nothing; each argument is one value for all, or one for each row."""

    def column(value, kind: type) -> np.ndarray:
        return np.ascontiguousarray(np.broadcast_to(np.asarray(value, kind), (rows,)))

    allowed = np.zeros((rows, -(-width // 32) * 32), bool)
    allowed[:, :width] = True
    return Sampling(
        temperature=column(temperature, np.float32),
        top_k=column(top_k, np.int32),
        top_p=column(top_p, np.float32),
        min_p=column(min_p, np.float32),
        key=np.zeros((rows, 2), np.uint32),
        repetition=column(1, np.float32),
        presence=column(0, np.float32),
        frequency=column(0, np.float32),
        bias_ids=np.full((rows, BIASES), -1, np.int32),
        bias_values=np.zeros((rows, BIASES), np.float32),
        allowed=np.packbits(allowed, axis=1, bitorder="little").view("<u4"),
        has_mask=column(False, bool),
        end_ids=np.full((rows, ENDS), -1, np.int32),
        min_lens=column(0, np.int32),
        prompt_lens=column(0, np.int32),
        wants_top=column(False, bool),
    )


def edited_rows(
    rows: int, width: int, context: int, seed: int
) -> tuple[Sampling, np.ndarray, np.ndarray]:
    """Sampling, history and positions that ask for every mixture of edits, at temperature 1."""
    rng = np.random.default_rng(seed)

    def some(share: float, values: np.ndarray, otherwise: float) -> np.ndarray:
        return np.where(rng.random(rows) < share, values, otherwise).astype(np.float32)

    plain = drawn_with(rows, width, 1, 0, 1, 0)
    ids = np.full((rows, BIASES), -1, np.int32)
    ends = np.full((rows, ENDS), -1, np.int32)
    allowed = np.zeros((rows, plain.allowed.shape[1] * 32), bool)
    for row in range(rows):
        chosen = rng.permutation(width)[: rng.integers(0, BIASES + 1)]
        ids[row, : len(chosen)] = chosen
        last = rng.permutation(width)[: rng.integers(0, ENDS + 1)]
        ends[row, : len(last)] = last
        allowed[row, :width] = rng.random(width) < rng.choice([0.02, 0.5, 1])
        # Some rows may say nothing but their ends.
        if len(last) and rng.random() < 0.3:
            allowed[row] = False
            allowed[row, last] = True
        allowed[row, rng.integers(width)] |= not allowed[row].any()
    sampling = dataclasses.replace(
        plain,
        repetition=some(0.5, rng.uniform(0.3, 3, rows), 1),
        presence=some(0.4, rng.uniform(-2, 2, rows), 0),
        frequency=some(0.4, rng.uniform(-2, 2, rows), 0),
        bias_ids=ids,
        bias_values=np.where(ids >= 0, rng.uniform(-9, 9, ids.shape), 0).astype(np.float32),
        allowed=np.packbits(allowed, axis=1, bitorder="little").view("<u4"),
        has_mask=~allowed[:, :width].all(axis=1),
        end_ids=ends,
        min_lens=rng.integers(0, context + 2, rows).astype(np.int32),
        prompt_lens=rng.integers(0, context + 2, rows).astype(np.int32),
    )
    # Few distinct tokens, so that many are said often.
    history = rng.choice(width, (rows, context)) // rng.choice([1, 7], (rows, 1))
    return sampling, history.astype(np.int32), rng.integers(0, context + 1, rows).astype(np.int32)
