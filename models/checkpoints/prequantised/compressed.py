"""The formats of compressed-tensors (https://github.com/vllm-project/compressed-tensors)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from ...errors import StokerError
from ...placing.cutting import without_factors
from ...quantized import QuantArray
from .checkpoint import Along, Builder, Parts, Source
from .floats import FP8, add_floats, alike, blocks_source, drop_activation_scales
from .grids import check_order, words_along
from .layouts import four_bit_floats, integers, neighbours, powers_of_two, spread, unpack_words
from .settings import Settings, matches, refuse_spared

_PACKED = "pack-quantized"
_NVFP4, _MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
#: Formats whose matrix is one tensor `weight`, with a code to each element.
_PLAIN = ("int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized")
_MIXED = "mixed-precision"
_FORMATS = (_PACKED, *_PLAIN, _NVFP4, _MXFP4)
_SCALES = ("F32", "BF16", "F16")
_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
#: How scales were found; the tensors have their types.
_HARMLESS_ARGS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
#: Stoker rounds neither activations nor the cache to these formats.
_HARMLESS_GROUP = ("input_activations", "output_activations")
_HARMLESS = ("kv_cache_scheme", "global_compression_ratio", "version")


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How the matrices of some modules are stored.

    Attributes:
      targets: names, patterns and classes of modules.
      format: one of `_FORMATS`.
      bits: width of a code.
      floats: whether codes are floats.
      symmetric: whether all zero points are zero.
      block: rows and columns that share a scale; 0: all there are.
    """

    targets: tuple[str, ...]
    format: str
    bits: int
    floats: bool
    symmetric: bool
    block: tuple[int, int]

    def blocks(self, rows: int, columns: int) -> tuple[int, int]:
        """The block of a matrix `[rows, columns]`."""
        height, width = self.block
        return height or rows, width or columns


def read_compressed(settings: Settings, builder: Builder) -> None:
    """`quant_method: compressed-tensors`, with any number of groups of modules."""
    status = settings.value("quantization_status", "compressed")
    if status != "compressed":
        settings.unsupported("quantization_status")
    overall = settings.value("format", _MIXED)
    sparsity = settings.inner("sparsity_config")
    if sparsity.value("format", "dense") != "dense":
        sparsity.unsupported("format")
    groups = settings.inner("config_groups")
    schemes = [_scheme(groups.inner(name), overall) for name in groups.values]
    spared = settings.names("ignore")
    drop_activation_scales(builder)
    # A packed matrix goes by another name; of the others, the type tells.
    modules = dict.fromkeys(builder.modules(".weight_packed"), True)
    for name, tensor in builder.files.tensors.items():
        if name.endswith(".weight") and tensor.dtype in ("I8", *FP8):
            modules[name.removesuffix(".weight")] = False
    for module, packed in modules.items():
        refuse_spared(module, spared)
        scheme = _scheme_of(module, schemes)
        if packed == (scheme.format in _PLAIN):
            raise StokerError(
                f"the tensors of '{module}' are not those of {scheme.format}, which config.json "
                "says it has; download the model again"
            )
        builder.drop([f"{module}.input_global_scale"])  # of activations too
        if scheme.format == _PACKED:
            _add_packed(builder, module, scheme)
        elif scheme.format in (_NVFP4, _MXFP4):
            _add_four_bit_floats(builder, module, scheme)
        elif scheme.floats:
            columns = builder.stored(f"{module}.weight").shape[-1]
            rows = builder.stored(f"{module}.weight").shape[-2]
            block = list(scheme.blocks(rows, columns))
            add_floats(builder, f"{module}.weight", f"{module}.weight_scale", block)
        else:
            _add_bytes(builder, module, scheme)
    settings.check_known("compressed-tensors", _HARMLESS)


def _scheme(group: Settings, overall: Any) -> Scheme:
    """One of `config_groups`."""
    format = group.value("format", overall)
    if format not in _FORMATS:
        raise StokerError(
            f"{group.where}: 'format' is {format!r:.40}, which is not supported; give a model of "
            f"{', '.join(_FORMATS)}"
        )
    weights = group.inner("weights")
    bits = weights.integer("num_bits", 8)
    floats = weights.one_of("type", "int", "float") == "float"
    symmetric = weights.flag("symmetric", True)
    if weights.values.get("dynamic"):
        weights.unsupported("dynamic")
    # Any other order comes with indices, which `check_order` looks at.
    weights.value("actorder", False)
    size = weights.value("group_size", -1)
    strategy = weights.value("strategy", "group" if size != -1 else "tensor")
    if strategy not in _STRATEGIES:
        weights.unsupported("strategy")
    if strategy == "block":
        height, width = weights.items("block_structure", 2, exact=True)
    elif strategy in ("group", "tensor_group"):
        height, width = 1, size
    else:
        height, width = int(strategy == "channel"), 0
    sizes = (height, width)
    if not all(type(it) is int and it >= 0 for it in sizes) or not 1 <= bits <= 8:
        raise StokerError(
            f"{weights.where} has {bits!r:.10} bits in blocks of {sizes!r:.30}, which is not "
            "possible; download it again"
        )
    integers_of = (_PACKED, "int-quantized")
    wrong = floats == (format in integers_of) and format != "naive-quantized"
    if wrong or (floats and (bits != 4 if format in (_NVFP4, _MXFP4) else bits != 8)):
        weights.unsupported("num_bits" if floats and format not in integers_of else "type")
    if floats and not symmetric:
        weights.unsupported("symmetric")
    weights.check_known("compressed-tensors", _HARMLESS_ARGS)
    targets = tuple(group.names("targets"))
    group.check_known("compressed-tensors", _HARMLESS_GROUP)
    return Scheme(targets, format, bits, floats, symmetric, sizes)


def _scheme_of(module: str, schemes: list[Scheme]) -> Scheme:
    """The scheme of a module: names go before patterns, and those before classes."""
    kind = "Embedding" if module.rpartition(".")[2].startswith("embed") else "Linear"
    tests = (
        lambda target: target == module,
        lambda target: target.startswith("re:") and matches(module, target),
        lambda target: target == kind,
    )
    for test in tests:
        for scheme in schemes:
            if any(test(target) for target in scheme.targets):
                return scheme
    raise StokerError(
        f"config.json: no target of config_groups is '{module}', whose tensors are quantised; "
        "download the model again"
    )


def _check_scale(builder: Builder, name: str, shape: tuple[int, int], scheme: Scheme) -> None:
    """Raises `StokerError` unless scales (or zero points) are one to each block."""
    (rows, columns), (height, width) = shape, scheme.blocks(*shape)
    blocks = (-(-rows // height), -(-columns // width))
    flat = [(blocks[0],)] if blocks[1] == 1 else []
    builder.check_shape(name, blocks, *flat, *([()] if blocks == (1, 1) else []))


def _add_bytes(builder: Builder, module: str, scheme: Scheme) -> None:
    """Signed integers of up to 8 bits, a byte each."""
    names = {"codes": f"{module}.weight", "scale": f"{module}.weight_scale"}
    shape = _matrix(builder, names["codes"], "I8")
    builder.stored(names["scale"], *_SCALES)
    zero = f"{module}.weight_zero_point"
    if not scheme.symmetric:
        names["zero"] = zero
        builder.stored(zero, "I8")
    for part in names.keys() - {"codes"}:
        _check_scale(builder, names[part], shape, scheme)
    make = functools.partial(_bytes, scheme=scheme, whole=shape[1])
    block = scheme.blocks(*shape)
    sources = {part: blocks_source(name, block, shape) for part, name in names.items()}
    sources["codes"] = alike(names["codes"], 2)
    builder.add(names["codes"], shape, sources, make)


def _bytes(parts: Parts, _: int, scheme: Scheme, whole: int) -> QuantArray:
    codes = parts["codes"].view(np.uint8) ^ np.uint8(128)
    zero = parts["zero"].astype(np.int32) + 128 if "zero" in parts else 128
    return _grid(codes, parts["scale"], zero, 8, scheme, whole)


def _add_packed(builder: Builder, module: str, scheme: Scheme) -> None:
    """Integers of 1 to 8 bits in 32-bit words, plus half their range."""
    packed, shaped = f"{module}.weight_packed", f"{module}.weight_shape"
    builder.stored(shaped, "I64", "I32")
    builder.check_shape(shaped, (2,))
    rows, columns = (int(size) for size in builder.read(shaped))
    builder.drop([shaped])
    builder.stored(packed, "I32")
    builder.check_shape(packed, (rows, -(-columns * scheme.bits // 32)))
    scale = f"{module}.weight_scale"
    builder.stored(scale, *_SCALES)
    _check_scale(builder, scale, (rows, columns), scheme)
    height, width = block = scheme.blocks(rows, columns)
    sources = {
        "codes": Source(packed, (Along(0), words_along(1, scheme.bits))),
        "scale": blocks_source(scale, block, (rows, columns)),
    }
    if not scheme.symmetric:
        zero = f"{module}.weight_zero_point"
        builder.stored(zero, "I32")
        if height != 1:
            raise StokerError(
                f"tensor '{zero}' is packed for blocks of {height} rows, which is not "
                "supported; give a model with scales for groups or channels"
            )
        builder.check_shape(zero, (-(-rows * scheme.bits // 32), -(-columns // width)))
        groups = Along(1, width) if width < columns else None
        sources["zero"] = Source(zero, (words_along(0, scheme.bits), groups))
    check_order(builder, f"{module}.weight_g_idx", columns, width)
    make = functools.partial(_packed, scheme=scheme, whole=columns)
    builder.add(f"{module}.weight", (rows, columns), sources, make)


def _packed(parts: Parts, columns: int, scheme: Scheme, whole: int) -> QuantArray:
    codes = unpack_words(parts["codes"], scheme.bits, columns)
    zero: Any = 2 ** (scheme.bits - 1)
    if "zero" in parts:
        words = np.ascontiguousarray(parts["zero"].T)
        zero = np.ascontiguousarray(unpack_words(words, scheme.bits, len(codes)).T)
    return _grid(codes, parts["scale"], zero, scheme.bits, scheme, whole)


def _grid(codes: Any, scale: Any, zero: Any, bits: int, scheme: Scheme, whole: int) -> QuantArray:
    """Scales, and zero points where there are several, are one to each block."""
    rows, columns = codes.shape
    block = scheme.blocks(rows, whole)
    blocks = (-(-rows // block[0]), -(-columns // block[1]))
    scale, group = spread(scale.reshape(blocks), rows, columns, block, whole)
    if not isinstance(zero, int):
        zero, _ = spread(zero.reshape(blocks), rows, columns, block, whole)
    return integers(codes, scale, zero, bits, group, scheme.symmetric)


def _add_four_bit_floats(builder: Builder, module: str, scheme: Scheme) -> None:
    """NVFP4, with 8-bit scales over a divisor for the matrix, and MXFP4, with powers of two."""
    packed, scale = f"{module}.weight_packed", f"{module}.weight_scale"
    rows, half = _matrix(builder, packed, "U8")
    columns, group = half * 2, scheme.block[1]
    if scheme.block[0] != 1 or group == 0 or group % 2 or columns % group:
        raise StokerError(
            f"'{module}' has {columns} inputs in groups of {group}, which is not possible; "
            "quantise the model again with groups that fit"
        )
    builder.stored(scale, "F8_E4M3" if scheme.format == _NVFP4 else "U8")
    builder.check_shape(scale, (rows, columns // group))
    sources = {
        "codes": Source(packed, (Along(0), Along(1, 2))),
        "scale": Source(scale, (Along(0), Along(1, group))),
    }
    if scheme.format == _NVFP4:
        divisor = f"{module}.weight_global_scale"
        builder.stored(divisor, "F32")
        builder.check_shape(divisor, (1,), ())
        sources["divisor"] = Source(divisor, (None, None))
    make = functools.partial(_four_bit_floats, group=group, whole=columns)
    builder.add(f"{module}.weight", (rows, columns), sources, make)


def _four_bit_floats(parts: Parts, columns: int, group: int, whole: int) -> QuantArray:
    scale, factor = parts["scale"], None
    if "divisor" in parts:
        # The library divides each scale: this differs from it by a rounding of float32 at most.
        factor = np.full((len(scale), 1), np.float32(1) / parts["divisor"].reshape(()), np.float32)
    else:
        scale = powers_of_two(scale)
    array = four_bit_floats(neighbours(parts["codes"]), scale, factor, group)
    # A factor is for whole rows.
    return array if columns == whole else without_factors(array)


def _matrix(builder: Builder, name: str, dtype: str) -> tuple[int, int]:
    shape = builder.stored(name, dtype).shape
    if len(shape) != 2:
        raise StokerError(f"tensor '{name}' has shape {list(shape)}; it must be a matrix")
    return shape
