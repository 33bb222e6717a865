"""Formats of small floats: fp8 as DeepSeek and Hugging Face store it, and GPT-OSS's MXFP4."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import StokerError
from ...quantized import QuantArray
from .checkpoint import Along, Builder, Parts, Source
from .layouts import mxfp4, powers_of_two, spread
from .settings import Settings, refuse_spared

FP8 = ("F8_E4M3", "F8_E5M2")
#: Scales of activations and of cached keys and values: Stoker rounds neither to these formats, so
#: that what they were calibrated for never happens.
_ACTIVATION_SCALES = (
    *(".input_scale", ".output_scale", ".activation_scale"),
    *(".k_scale", ".v_scale", ".q_scale"),
)
_BLOCK = [128, 128]


def drop_activation_scales(builder: Builder) -> None:
    """Leaves out the tensors that only rounding of activations or of the cache would need."""
    for suffix in _ACTIVATION_SCALES:
        builder.drop(module + suffix for module in builder.modules(suffix))


def read_fp8(settings: Settings, builder: Builder) -> None:
    """`quant_method: fp8`: a scale to each block of a matrix, to each row, or to all of it.

    The value is the 8-bit float times the scale, which is called `weight_scale_inv` in spite of
    that (https://github.com/deepseek-ai/DeepSeek-V3, `inference/kernel.py`).
    """
    settings.one_of("activation_scheme", "dynamic", "static")
    settings.one_of("expert_dtype", "fp8")
    settings.one_of("scale_fmt", "float", "ue8m0")
    settings.one_of("fmt", "e4m3", "e5m2", "float8_e4m3fn")
    block = settings.value("weight_block_size", _BLOCK)
    _read(settings, builder, ("_scale_inv", "_scale"), block)
    settings.check_known("fp8", ("dequantize", "modules_to_convert"))


def read_fbgemm(settings: Settings, builder: Builder) -> None:
    """`quant_method: fbgemm_fp8`: a scale to each row, `weight_scale`."""
    _read(settings, builder, ("_scale",), _BLOCK)
    builder.drop(module + ".input_scale_ub" for module in builder.modules(".input_scale_ub"))
    settings.check_known("fbgemm_fp8", ("activation_scale_ub",))


def _read(settings: Settings, builder: Builder, endings: Sequence[str], block: Any) -> None:
    drop_activation_scales(builder)
    spared = settings.names("modules_to_not_convert", "ignored_layers")
    for name, tensor in builder.files.tensors.items():
        if tensor.dtype not in FP8:
            continue
        refuse_spared(name.removesuffix(".weight"), spared)
        scales = [name + ending for ending in endings if builder.has(name + ending)]
        add_floats(builder, name, scales[0] if scales else name + endings[0], block)


def add_floats(builder: Builder, name: str, scale: str, block: Any) -> None:
    """Adds a matrix `[..., R, C]` of 8-bit floats.

    Args:
      builder: has its tensors.
      name: of the floats, and of the plain tensor.
      scale: name of its scales: one, one to each row, or one to each block.
      block: rows and columns of a block.
    """
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(type(size) is int and size > 0 for size in block)
    ):
        raise StokerError(
            f"config.json: the block of quantized weights is {block!r:.40}; it must be two sizes"
        )
    shape = builder.stored(name, *FP8).shape
    if len(shape) < 2:
        raise StokerError(f"tensor '{name}' has shape {list(shape)}; it must be a matrix")
    *leading, rows, columns = shape
    height, width = block
    blocks = (*leading, -(-rows // height), -(-columns // width))
    builder.stored(scale, "F32", "BF16", "F16", "F8_E8M0", "U8")
    whole = ((*leading,), (*leading, 1), (*leading, 1, 1))
    builder.check_shape(scale, blocks, (*leading, rows), (*leading, rows, 1), *whole)
    found = builder.stored(scale).shape
    if found == blocks:
        size = (height, width)
    elif math.prod(found) == math.prod(leading) * rows:
        size = (1, columns)
    else:
        size = (rows, columns)
    make = functools.partial(_floats, block=size, whole=columns)
    experts = tuple(map(Along, range(len(leading))))
    # One scale to each row may have an axis for its only column, or not.
    own = (
        Along(len(leading), size[0]) if size[0] < rows else None,
        Along(len(leading) + 1, size[1]) if size[1] < columns else None,
    )
    sources = {"codes": alike(name, len(shape)), "scale": Source(scale, (*experts, *own))}
    builder.add(name, shape, sources, make)


def alike(name: str, ndim: int) -> Source:
    """A stored tensor that has an entry for each element of a matrix of `ndim` axes."""
    return Source(name, tuple(map(Along, range(ndim))))


def blocks_source(name: str, block: tuple[int, int], shape: tuple[int, int]) -> Source:
    """The scales of a matrix, one to each block."""
    sizes = enumerate(zip(block, shape, strict=True))
    return Source(name, tuple(Along(axis, of) if of < all_ else None for axis, (of, all_) in sizes))


def _floats(parts: Parts, columns: int, block: tuple[int, int], whole: int) -> QuantArray:
    codes, scale = parts["codes"], parts["scale"]
    *leading, rows, _ = codes.shape
    if scale.dtype == np.uint8:
        scale = powers_of_two(scale)
    scale = scale.reshape(*leading, -(-rows // block[0]), -1)
    scale, group = spread(scale, rows, columns, block, whole)
    return QuantArray(codes, scale, bits=8, group=group)


def read_mxfp4(settings: Settings, builder: Builder) -> None:
    """`quant_method: mxfp4`: GPT-OSS's experts, `..._blocks` and `..._scales` side by side.

    Block format: Open Compute Project, Microscaling Formats 1.0. The plain tensor is what the
    names share, `[E, R, C]` with R outputs: the transpose of what float checkpoints hold.
    """
    spared = settings.names("modules_to_not_convert")
    for name in builder.modules("_blocks"):
        refuse_spared(name.rpartition(".")[0], spared)
        blocks, scales = f"{name}_blocks", f"{name}_scales"
        *rows, groups, half = builder.stored(blocks, "U8").shape
        if len(rows) not in (1, 2) or half != 16:
            raise StokerError(
                f"tensor '{blocks}' has shape {[*rows, groups, half]} where mxfp4 needs blocks of "
                "16 bytes; convert the model again"
            )
        builder.stored(scales, "U8")
        builder.check_shape(scales, (*rows, groups))
        axes = (*map(Along, range(len(rows))), Along(len(rows), 32))
        sources = {"blocks": Source(blocks, axes), "scales": Source(scales, axes)}
        builder.add(name, (*rows, groups * 32), sources, _mxfp4)
    settings.check_known("mxfp4", ("dequantize",))


def _mxfp4(parts: Parts, _: int) -> QuantArray:
    return mxfp4(parts["blocks"], parts["scales"])
