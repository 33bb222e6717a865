"""Context extension of rotary embeddings, as divisors of frequencies and a factor on the cosines.

Each function returns what a `Rope` takes; who reads a checkpoint chooses among them.
"""

from __future__ import annotations

import math

#: Widest rotary embedding whose factors are worth computing; a file may claim any.
_MAX_DIMS = 1 << 16


def llama3_factors(
    theta: float, dims: int, *, factor: float, low: float, high: float, original: int
) -> tuple[float, ...]:
    """Divisors of Llama 3.1's scaling, one for each of the dims/2 frequencies.

    A wave that fits `original / high` positions stays, one that is longer than `original / low` is
    stretched by `factor`, and between the two the multiplier 1/factor..1 is interpolated in the
    number of waves that fit the original context. Source: `apply_scaling` of Meta's llama-models.
    """
    factors = []
    for pair in _pairs(dims):
        waves = original / (2 * math.pi * theta ** (2 * pair / dims))
        share = min(max((waves - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - share) / factor + share))
    return tuple(factors)


def yarn_factors(
    theta: float,
    dims: int,
    *,
    factor: float,
    original: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> tuple[float, ...]:
    """Divisors of YaRN, one for each of the dims/2 frequencies.

    Frequencies that turn more than `beta_fast` times within `original` positions stay, those below
    `beta_slow` turns are divided by `factor`, with a ramp over the pairs between them, whose ends
    are rounded outwards where `truncate`. Source: Peng et al. 2023, arXiv:2309.00071, section 3.2.
    """

    def pair_of(turns: float) -> float:
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_of(beta_fast), pair_of(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    width = high - low or 0.001
    factors = []
    for pair in _pairs(dims):
        share = min(max((pair - low) / width, 0.0), 1.0)
        factors.append(1 / (share / factor + 1 - share))
    return tuple(factors)


def yarn_attention_factor(factor: float, mscale: float = 1.0, mscale_all: float = 0.0) -> float:
    """What YaRN multiplies cosines and sines by: 0.1 ln(factor) + 1 (section 3.4 of the paper).

    With both `mscale` and `mscale_all` (DeepSeek) it is the ratio of the two such terms.
    """
    if mscale and mscale_all:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all)
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, weight: float) -> float:
    """The term 0.1 weight ln(factor) + 1 of YaRN; 1 where nothing is extended."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def longrope_attention_factor(factor: float, original: int) -> float:
    """What LongRoPE multiplies cosines and sines by: sqrt(1 + ln(factor) / ln(original)).

    Source: Ding et al. 2024, arXiv:2402.13753, as Phi-3 has it; 1 where nothing is extended.
    """
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _pairs(dims: int) -> range:
    if dims > _MAX_DIMS:
        raise ValueError(f"a rotary width of {dims} is more than {_MAX_DIMS}")
    return range(dims // 2)
