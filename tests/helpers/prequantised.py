"""Weights as AWQ, GPTQ, fp8 and compressed-tensors store them, written from their descriptions.

Each writer returns what a file holds of one matrix, by the ending of its module's name, and the
float32 values that these numbers stand for, computed without anything of Stoker.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from hf_models import Case, make, write
from safetensors.numpy import load_file, save_file

Stored = dict[str, np.ndarray]
Writer = Callable[[np.random.Generator, int, int], tuple[Stored, np.ndarray]]
#: Matrices that are quantised: not embeddings, routers and heads.
LINEAR = re.compile(r".*(_proj|w[123])\.weight")


@dataclasses.dataclass(frozen=True)
class Format:
    """A way to store matrices: `quantization_config`, and a writer of `[R, C]`."""

    config: dict[str, Any]
    write: Writer


def into_words(values: np.ndarray, bits: int) -> np.ndarray:
    """Rows of small numbers as int32 words, bit by bit from the lowest; padded with zeros."""
    each = (values[..., None].astype(np.uint64) >> np.arange(bits, dtype=np.uint64)) & 1
    stream = each.reshape(*values.shape[:-1], -1).astype(np.uint8)
    padding = [(0, 0)] * (stream.ndim - 1) + [(0, -stream.shape[-1] % 32)]
    return np.packbits(np.pad(stream, padding), axis=-1, bitorder="little").view("<i4")


def spread_out(rng: np.random.Generator, shape: tuple[int, ...], inputs: int, peak: float) -> Any:
    """Scales with which codes up to `peak` give weights of about the size that models have."""
    return rng.uniform(0.5, 1.5, shape) * 4 * inputs**-0.5 / peak


def grid(rng: np.random.Generator, R: int, C: int, bits: int, group: int, middle: bool) -> Any:
    """Codes `[C, R]`, zeros and float16 scales `[C/group, R]` by input, and values `[R, C]`."""
    codes = rng.integers(0, 2**bits, (C, R))
    zeros = rng.integers(1, 2**bits, (C // group, R))
    if middle:
        zeros[:] = 2 ** (bits - 1)
    scales = spread_out(rng, zeros.shape, C, 2**bits).astype(np.float16)
    wide = np.repeat(scales.astype(np.float64), group, axis=0)
    values = (codes - np.repeat(zeros, group, axis=0)) * wide
    assert np.array_equal(values, values.astype(np.float32))
    return codes, zeros, scales, values.T.astype(np.float32)


def gptq(bits: int, group: int, less: int, middle: bool = False) -> Writer:
    """Codes run down the inputs; zero points, less `less`, along the outputs."""

    def write(rng: np.random.Generator, R: int, C: int) -> tuple[Stored, np.ndarray]:
        size = C if group == -1 else group
        codes, zeros, scales, values = grid(rng, R, C, bits, size, middle)
        stored = {
            ".qweight": np.ascontiguousarray(into_words(codes.T, bits).T),
            ".qzeros": into_words(zeros - less, bits),
            ".scales": scales,
            ".g_idx": (np.arange(C) // size).astype(np.int32),
        }
        return stored, values

    return write


def awq(rng: np.random.Generator, R: int, C: int) -> tuple[Stored, np.ndarray]:
    """Eight outputs to a word, the even ones first."""
    codes, zeros, scales, values = grid(rng, R, C, 4, 32, False)

    def words(numbers: np.ndarray) -> np.ndarray:
        eights = numbers.reshape(len(numbers), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return into_words(eights.reshape(len(numbers), -1), 4)

    return {".qweight": words(codes), ".qzeros": words(zeros), ".scales": scales}, values


def fp8(
    block: tuple[int, int] | None, ending: str, kind: str = "float8_e4m3fn", power: bool = False
) -> Writer:
    """Eight-bit floats with a scale to each block, each row (0, 1) or the matrix (None)."""

    def write(rng: np.random.Generator, R: int, C: int) -> tuple[Stored, np.ndarray]:
        codes = rng.normal(0, 30, (R, C)).astype(getattr(ml_dtypes, kind))
        height, width = (R, C) if block is None else (block[0] or 1, block[1] or C)
        shape = (-(-R // height), -(-C // width))
        scale = spread_out(rng, shape, C, 60).astype(np.float32)
        if power:
            scale = np.exp2(np.round(np.log2(scale)))
        full = np.repeat(np.repeat(scale, height, 0), width, 1)[:R, :C]
        stored: Stored = {".weight": codes, ending: scale if block else scale.reshape(())}
        if block is None:
            stored[".input_scale"] = np.float32(3.0).reshape(1)
        return stored, codes.astype(np.float32) * full

    return write


def fp8_config(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", **changes}


def gptq_config(bits: int, group: int, **changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, **changes}


AWQ_CONFIG = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": ["lm_head"],
}
FORMATS = {
    "awq": Format(AWQ_CONFIG, awq),
    "gptq-4": Format(gptq_config(4, 32, sym=False), gptq(4, 32, 1)),
    "gptq-4-middle": Format(gptq_config(4, 16, checkpoint_format="gptq"), gptq(4, 16, 1, True)),
    "gptq-8": Format(gptq_config(8, -1, checkpoint_format="gptq_v2"), gptq(8, -1, 0)),
    "gptq-8-middle": Format(gptq_config(8, 32), gptq(8, 32, 1, True)),
    "gptq-3": Format(gptq_config(3, 32), gptq(3, 32, 1)),
    "gptq-2": Format(gptq_config(2, 32), gptq(2, 32, 1)),
    "fp8-blocks": Format(
        fp8_config(weight_block_size=[32, 32]), fp8((32, 32), ".weight_scale_inv")
    ),
    "fp8-odd-blocks": Format(
        fp8_config(weight_block_size=[40, 48]), fp8((40, 48), ".weight_scale_inv")
    ),
    "fp8-powers": Format(
        fp8_config(scale_fmt="ue8m0"), fp8((128, 128), ".weight_scale_inv", power=True)
    ),
    "fp8-tensor": Format(fp8_config(activation_scheme="static"), fp8(None, ".weight_scale")),
    "fp8-rows-e5m2": Format(fp8_config(fmt="e5m2"), fp8((0, 0), ".weight_scale", "float8_e5m2")),
    "fbgemm": Format(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8((0, 0), ".weight_scale")
    ),
}


def quantised(
    folder: pathlib.Path, case: Case, format: Format, seed: int = 0
) -> tuple[pathlib.Path, pathlib.Path, dict[str, np.ndarray]]:
    """A tiny model in two folders, quantised and plain, and the plain values of its matrices."""
    plain, other = folder / "plain", folder / "quantised"
    write(make(case), plain)
    tensors = load_file(plain / "model.safetensors")
    rng = np.random.default_rng(seed)
    dense: dict[str, np.ndarray] = {}
    stored: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        if not LINEAR.fullmatch(name):
            stored[name] = tensor
            continue
        parts, values = format.write(rng, *tensor.shape)
        assert np.isfinite(values).all() and values.std() > 0.1 * tensor.std()
        module = name.removesuffix(".weight")
        # The library writes others in the order that they have in memory.
        dense[name] = np.ascontiguousarray(values)
        stored |= {module + ending: np.array(it, order="C") for ending, it in parts.items()}
    save_file(tensors | dense, plain / "model.safetensors", metadata={"format": "pt"})
    other.mkdir()
    save_file(stored, other / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"quantization_config": format.config}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).write_bytes((plain / name).read_bytes())
    return other, plain, dense
