"""The numbers that decide draws: a published generator, and what its use must not spoil."""

from __future__ import annotations

import numpy as np
import pytest

from stoker.models.ops.sampling import philox, uniforms

COUNT = 8192
#: Seeds as users give them, and as positions follow each other.
RISING = np.arange(COUNT)
SPREAD = np.random.default_rng(0).integers(0, 2**63, COUNT)
STREAMS = {
    "seeds": (RISING, np.full(COUNT, 3)),
    "seeds of one low word": (RISING << 32, np.full(COUNT, 3)),
    "random seeds": (SPREAD, np.full(COUNT, 3)),
    "positions": (np.full(COUNT, 5), RISING),
    "positions of seed 0": (np.zeros(COUNT, np.int64), RISING),
    "both": (RISING, RISING),
    "one rises, one falls": (RISING, RISING[::-1]),
}


def numbers(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    keys = np.stack([seeds >> 32, seeds & 0xFFFFFFFF], -1).astype(np.uint32)
    return np.asarray(uniforms(keys, positions.astype(np.int32)))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0), 0, (0xFF1DAE59, 0x6CD10DF2)),
        ((0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0x2C3F628B, 0xAB4FD7AD)),
        ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xDD7CE038, 0xF62A4C12)),
    ],
)
def test_philox_gives_its_published_answers(counter: tuple, key: int, expected: tuple) -> None:
    """The known answers that its authors publish with Random123, for ten rounds."""
    words = philox(*(np.array([word], np.uint32) for word in (*counter, key)))
    assert [int(word[0]) for word in words] == list(expected)


@pytest.mark.parametrize("name", STREAMS)
def test_numbers_are_uniform(name: str) -> None:
    """A chi-square of 64 cells, and of 16 by 16 pairs of neighbours, within five deviations."""
    drawn = numbers(*STREAMS[name])
    assert (drawn >= 0).all() and (drawn < 1).all()
    singles = np.bincount((drawn * 64).astype(int), minlength=64)
    coarse = (drawn * 16).astype(int)
    pairs = np.bincount(coarse[:-1] * 16 + coarse[1:], minlength=256)
    for counts in (singles, pairs):
        expected, freedom = counts.sum() / len(counts), len(counts) - 1
        chi = ((counts - expected) ** 2 / expected).sum()
        assert abs(chi - freedom) < 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("lag", [1, 2, 7, 64])
@pytest.mark.parametrize("name", STREAMS)
def test_neighbours_do_not_correlate(name: str, lag: int) -> None:
    drawn = numbers(*STREAMS[name])
    correlation = np.corrcoef(drawn[:-lag], drawn[lag:])[0, 1]
    assert abs(correlation) < 5 / np.sqrt(COUNT - lag)


@pytest.mark.parametrize("bit", range(63))
def test_each_bit_of_a_seed_and_of_a_position_counts(bit: int) -> None:
    """Flipping one flips about half of a number's 24 bits."""
    seeds, positions = SPREAD[:512], RISING[:512]
    flipped = [numbers(seeds ^ (1 << bit), positions)]
    if bit < 31:
        flipped.append(numbers(seeds, positions ^ (1 << bit)))
    before = (numbers(seeds, positions) * 2**24).astype(np.uint32)
    for after in flipped:
        changed = np.bitwise_count(before ^ (after * 2**24).astype(np.uint32)).mean()
        # A mean of 512 sums of 24 fair bits has a deviation of 0.11.
        assert abs(changed - 12) < 0.55
