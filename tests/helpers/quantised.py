"""Random quantised matrices in the shapes that file formats use."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from stoker.models.quantized import E2M1, QuantArray

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
#: Groups of many columns, which integers serve on TPUs and GPUs; and of few, which a GPU could.
WIDE: dict[str, tuple[int, int, int, int, bool, int]] = {
    "awq": (384, 4, 128, 0, True, 0),
    "gptq": (256, 4, 128, 8, False, 0),
    "int8_256": (512, 8, 256, 3, True, 0),
    "int4_256": (512, 4, 256, 7, True, 0),
    "int8_row": (384, 8, 384, 0, False, 0),
}
NARROW: dict[str, tuple[int, int, int, int, bool, int]] = {
    "int4_64": (128, 4, 64, 0, True, 0),
    "int8_32": (96, 8, 32, 5, False, 0),
}


def random_quant(name: str, rows: int, seed: int = 0) -> QuantArray:
    """A random matrix `[rows, C]` of the format, in numpy; float16 scales of about 1/100."""
    columns, bits, group, zero_point, minimum, factors = (FORMATS | WIDE | NARROW)[name]
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


def random_levels(kind: str, rows: int, seed: int = 0) -> QuantArray:
    """A random matrix `[rows, 96]` of four-bit floats: "mxfp4", "nvfp4", or "scale" float types."""
    rng = np.random.default_rng(seed)
    group = 16 if kind == "nvfp4" else 32
    codes = rng.integers(0, 256, (rows, 48), dtype=np.uint8)
    shape, factor = (rows, 96 // group), None
    if kind == "mxfp4":
        scale = rng.integers(110, 130, shape).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)
        scale[0, 0] = 2.0**-124  # the least whose values XLA does not flush to zero
    elif kind == "nvfp4":
        scale = rng.uniform(1, 448, shape).astype(ml_dtypes.float8_e4m3fn)
        factor = rng.uniform(1e-5, 1e-4, (rows, 1)).astype(np.float32)
    else:
        scale = rng.uniform(0.01, 0.02, shape).astype(kind)
        if kind == "float16":
            scale[0, 0] = 2.0**-24  # half of it is no float16
    return QuantArray(codes, scale, super_scale=factor, bits=4, group=group, levels=E2M1)


def random_floats(scale: float | None, rows: int, kind: str = "float8_e4m3fn") -> QuantArray:
    """A random matrix `[rows, 96]` of 8-bit floats in groups of 48; None: random scales."""
    rng = np.random.default_rng(0)
    codes = rng.normal(0, 2, (rows, 96)).astype(kind)
    scales = np.full((rows, 2), scale) if scale else rng.uniform(0.01, 0.02, (rows, 2))
    return QuantArray(codes, scales.astype(np.float32), group=48)
