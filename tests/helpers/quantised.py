"""Random quantised matrices in the shapes that file formats use."""

from __future__ import annotations

import numpy as np

from stoker.models.quantized import QuantArray

#: name: columns, bits, group, zero point, minimum, scales to a factor (0: none).
FORMATS: dict[str, tuple[int, int, int, int, bool, int]] = {
    "q4_0": (96, 4, 32, 8, False, 0),
    "q4_1": (160, 4, 32, 0, True, 0),
    "q8_0": (96, 8, 32, 0, False, 0),
    "q5_1": (64, 8, 32, 0, True, 0),
    "q2_k": (256, 4, 16, 0, True, 16),
    "q3_k": (256, 4, 16, 4, False, 16),
    "q4_k": (512, 4, 32, 0, True, 8),
    "q6_k": (256, 8, 16, 32, False, 16),
    "wide_group": (256, 4, 128, 8, False, 0),
    "whole_row": (144, 8, 144, 0, False, 0),
    "group_24": (72, 4, 24, 8, True, 0),
    "group_12": (60, 4, 12, 7, False, 0),
    "long_row": (2400, 4, 32, 8, True, 0),
}


def random_quant(name: str, rows: int, seed: int = 0) -> QuantArray:
    """A random matrix `[rows, C]` of the format, in numpy; float16 scales of about 1/100."""
    columns, bits, group, zero_point, minimum, factors = FORMATS[name]
    rng = np.random.default_rng(seed)
    shape = (rows, columns // group)
    if bits == 4:
        codes = rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
    else:
        codes = rng.integers(-127, 128, (rows, columns)).astype(np.int8)

    def scales(sign: int) -> tuple[np.ndarray, np.ndarray | None]:
        if not factors:
            return (sign * rng.uniform(0.005, 0.02, shape)).astype(np.float16), None
        factor = sign * rng.uniform(0.0002, 0.0006, (rows, shape[1] // factors))
        # Like the file formats: signed scales where there is no minimum, else unsigned.
        low, kind = (0, np.uint8) if minimum else (-32, np.int8)
        return rng.integers(low, 64, shape).astype(kind), factor.astype(np.float16)

    scale, super_scale = scales(1)
    least, super_least = scales(-1) if minimum else (None, None)
    return QuantArray(
        codes,
        scale,
        least,
        super_scale,
        super_least,
        bits=bits,
        zero_point=zero_point,
        group=group,
    )
