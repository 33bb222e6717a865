"""AWQ and GPTQ: integer codes on a grid for each group of inputs, packed into 32-bit words.

Layouts: AutoAWQ's `WQLinear_GEMM` (https://github.com/casper-hansen/AutoAWQ) and AutoGPTQ's
`QuantLinear` (https://github.com/AutoGPTQ/AutoGPTQ). Both store matrices by input.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from ...errors import StokerError
from ...quantized import QuantArray
from .checkpoint import Along, Builder, Parts, Source
from .layouts import integers, unpack_words
from .settings import Settings, refuse_spared

_WORD = 32
_SCALES = ("F16", "BF16", "F32")
#: AWQ: which of a word's eight outputs each of its nibbles is, from the lowest.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
#: How the codes were found, or how other engines run them: they change no value.
_HARMLESS_KEYS = """
act_group_aware backend batch_size block_name_to_quantize cache_block_outputs damp_percent dataset
disable_exllama do_fuse exllama_config fuse_max_seq_len lm_head max_input_length meta
model_file_base_name model_name_or_path model_seqlen module_name_preceding_first_block
modules_in_block_to_quantize modules_to_fuse mse pad_token_id quantizer static_groups tokenizer
true_sequential use_cuda_fp16 use_exllama desc_act
"""
_HARMLESS = tuple(_HARMLESS_KEYS.split())


def _groups(settings: Settings, module: str, columns: int) -> int:
    """Columns that share a scale: all of them where `group_size` is -1."""
    size = settings.value("group_size", 128)
    if type(size) is not int or size == 0 or size < -1:
        raise StokerError(f"{settings.where}: 'group_size' must be 1 or more, or -1, not {size!r}")
    size = columns if size == -1 else size
    if columns % size:
        raise StokerError(
            f"'{module}' has {columns} inputs, which do not divide into groups of {size}; quantise "
            "the model again with groups that fit"
        )
    return size


def read_awq(settings: Settings, builder: Builder) -> None:
    """AWQ (Lin et al. 2023) in the layout "gemm", whose value is `(code - zero) * scale`."""
    settings.one_of("bits", 4)
    settings.one_of("version", "gemm", "GEMM")
    settings.one_of("format", "gemm", "GEMM")
    settings.flag("zero_point", True)
    if settings.value("backend", "auto") == "llm-awq":
        settings.unsupported("backend")
    spared = settings.names("modules_to_not_convert")
    for module in builder.modules(".qweight"):
        refuse_spared(module, spared)
        names = {part: f"{module}.{part}" for part in ("qweight", "qzeros", "scales")}
        inputs, words = _matrix(builder, names["qweight"])
        outputs = words * 8
        group = _groups(settings, module, inputs)
        builder.stored(names["qzeros"], "I32")
        builder.check_shape(names["qzeros"], (inputs // group, words))
        builder.stored(names["scales"], *_SCALES)
        builder.check_shape(names["scales"], (inputs // group, outputs))
        groups = Along(0, group) if group < inputs else None
        sources = {
            # In pairs: codes of half a byte come by two.
            "qweight": Source(names["qweight"], (Along(1, 8), Along(0, 2, 2))),
            "qzeros": Source(names["qzeros"], (Along(1, 8), groups)),
            "scales": Source(names["scales"], (Along(1), groups)),
        }
        builder.add(f"{module}.weight", (outputs, inputs), sources, _awq)
    settings.check_known("awq", (*_HARMLESS, "sym"))


def _awq(parts: Parts, columns: int) -> QuantArray:
    def outputs(words: np.ndarray) -> np.ndarray:
        """uint8 `[outputs, n]` of words `[n, outputs/8]`."""
        words = np.ascontiguousarray(words.T).view(np.uint32)
        codes = np.empty((len(words), 8, words.shape[1]), np.uint8)
        for nibble, place in enumerate(_AWQ_ORDER):
            codes[:, place] = words >> np.uint32(4 * nibble) & np.uint32(15)
        return codes.reshape(-1, words.shape[1])

    scale = np.ascontiguousarray(parts["scales"].T)
    group = columns // scale.shape[-1]
    return integers(outputs(parts["qweight"]), scale, outputs(parts["qzeros"]), 4, group)


def read_gptq(settings: Settings, builder: Builder) -> None:
    """GPTQ (Frantar et al. 2022), whose value is `(code - zero) * scale`.

    The files of the first version store each zero point less one. A zero point of zero would have
    become -1 there, whose bits spill into its neighbours: no such file can be right.
    """
    bits = settings.one_of("bits", 4, 2, 3, 8)
    stored = settings.one_of("format", "gptq", "gptq_v2")
    layout = settings.one_of("checkpoint_format", stored, "gptq", "gptq_v2")
    settings.one_of("pack_dtype", "int32")
    symmetric = settings.flag("sym", True)
    settings.names("modules_to_not_convert")
    for key in ("is_marlin_format", "dynamic"):
        if settings.values.get(key):
            settings.unsupported(key)
    for module in builder.modules(".qweight"):
        names = {part: f"{module}.{part}" for part in ("qweight", "qzeros", "scales")}
        words, outputs = _matrix(builder, names["qweight"])
        inputs = words * _WORD // bits
        group = _groups(settings, module, inputs)
        builder.stored(names["qzeros"], "I32")
        builder.check_shape(names["qzeros"], (inputs // group, -(-outputs * bits // _WORD)))
        builder.stored(names["scales"], *_SCALES)
        builder.check_shape(names["scales"], (inputs // group, outputs))
        check_order(builder, f"{module}.g_idx", inputs, group)
        make = functools.partial(_gptq, bits=bits, less=int(layout == "gptq"), symmetric=symmetric)
        groups = Along(0, group) if group < inputs else None
        sources = {
            "qweight": Source(names["qweight"], (Along(1), words_along(0, bits))),
            "qzeros": Source(names["qzeros"], (words_along(1, bits), groups)),
            "scales": Source(names["scales"], (Along(1), groups)),
        }
        builder.add(f"{module}.weight", (outputs, inputs), sources, make)
    settings.check_known("gptq", _HARMLESS)


def words_along(axis: int, bits: int) -> Along:
    """An axis whose values, so many bits wide, are packed into words."""
    shared = math.gcd(_WORD, bits)
    return Along(axis, _WORD // shared, bits // shared)


def _gptq(parts: Parts, columns: int, bits: int, less: int, symmetric: bool) -> QuantArray:
    codes = unpack_words(np.ascontiguousarray(parts["qweight"].T), bits, columns)
    scale = np.ascontiguousarray(parts["scales"].T)
    zeros = unpack_words(parts["qzeros"], bits, len(scale)).T.astype(np.int32) + less
    return integers(codes, scale, zeros, bits, columns // scale.shape[-1], symmetric)


def check_order(builder: Builder, name: str, columns: int, group: int) -> None:
    """Raises `StokerError` unless `g_idx`, where it is there, says that groups are neighbours."""
    if not builder.has(name):
        return
    builder.drop([name])
    builder.stored(name, "I32", "I64")
    # Some writers leave it empty, or -1, where nothing was reordered.
    index = builder.read(name).reshape(-1)
    if index.size == 0 or np.all(index == -1):
        return
    if index.size != columns or np.any(index != np.arange(columns) // group):
        raise StokerError(
            f"tensor '{name}' scatters the columns of each group over the row (act-order), which "
            "is not supported; give a model quantised with desc_act=false, or static groups"
        )


def _matrix(builder: Builder, name: str) -> tuple[int, int]:
    shape = builder.stored(name, "I32").shape
    if len(shape) != 2:
        raise StokerError(f"tensor '{name}' has shape {list(shape)}; it must be a matrix")
    return shape
