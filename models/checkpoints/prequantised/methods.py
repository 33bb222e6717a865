"""By the name of a quantisation method: which types it stores, and what reads it."""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import StokerError
from ..safetensors import FLOATS, SafetensorsCheckpoint
from .checkpoint import Builder, QuantisedCheckpoint
from .compressed import read_compressed
from .floats import read_fbgemm, read_fp8, read_mxfp4
from .grids import read_awq, read_gptq
from .settings import Settings

#: Adds the quantised tensors, as the settings describe them.
Reader = Callable[[Settings, Builder], None]

_BYTES = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8")
#: By `quant_method`: what reads it, and the types of tensors it has beside plain ones.
METHODS: Mapping[str, tuple[Reader, tuple[str, ...]]] = types.MappingProxyType(
    {
        "awq": (read_awq, ("I32",)),
        "gptq": (read_gptq, ("I32",)),
        "fp8": (read_fp8, ("F8_E4M3", "F8_E5M2", "F8_E8M0")),
        "fbgemm_fp8": (read_fbgemm, ("F8_E4M3",)),
        "compressed-tensors": (read_compressed, (*_BYTES, "I32", "I64")),
        "mxfp4": (read_mxfp4, ("U8",)),
    }
)


def open_prequantised(folder: str | os.PathLike[str], config: Any) -> QuantisedCheckpoint:
    """Opens the safetensors of `folder` as `quantization_config` describes them.

    Headers, names, types and shapes are checked, and of the tensors only small ones are read.

    Args:
      folder: holds the safetensors.
      config: the value of `quantization_config` in its `config.json`.

    Raises:
      StokerError: the method, or one of its settings, is not supported, or tensors do not fit it.
    """
    settings = Settings(config)
    method = settings.value("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise StokerError(
            f"config.json: quant_method is {method!r:.40}, which is not supported; give a model "
            f"without quantization or of {', '.join(METHODS)}"
        )
    reader, dtypes = METHODS[method]
    builder = Builder(SafetensorsCheckpoint.open(folder, dtypes), method)
    reader(settings, builder)
    return builder.checkpoint(plain=FLOATS)
