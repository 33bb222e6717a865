"""Weights as the library compressed-tensors itself stores them, and what it reads back."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from prequantised import Format, Stored, spread_out

_TYPES = {"float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn)}


def _numpy(tensor: Any) -> np.ndarray:
    """A torch tensor of any type."""
    import torch

    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    return tensor.contiguous().numpy()


def compressed(format: str, name: str = "group_0", **weights: Any) -> Format:
    """A `Format` that the library writes.

    Args:
      format: the library's name of it.
      name: of the group in `config_groups`.
      weights: arguments of `QuantizationArgs`.
    """
    args = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", **weights}
    activations = {"num_bits": 8, "type": args["type"], "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": args, "input_activations": activations}
    config = {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {name: group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.20.1",
    }

    def write(rng: np.random.Generator, R: int, C: int) -> tuple[Stored, np.ndarray]:
        import torch
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationScheme

        # Sizes follow from the group, the block or the whole.
        height, width = args.get("block_structure") or (
            R if args["strategy"] == "tensor" else 1,
            args.get("group_size") or C,
        )
        shape = (-(-R // height), -(-C // width))
        if args["strategy"] == "tensor":
            shape = (1,)
        peak = {8: 127, 4: 8, 3: 4}[args["num_bits"]] if args["type"] == "int" else 30
        if args["type"] == "float" and args["num_bits"] == 4:
            peak = 3
        scale = spread_out(rng, shape, C, peak).astype(np.float32)
        state = {"weight": torch.tensor(rng.normal(0, 2 * C**-0.5, (R, C)), dtype=torch.float32)}
        if format.startswith("mx"):
            scale = np.exp2(np.round(np.log2(scale)))
        elif args["type"] == "int":
            # Of float16's precision, so that values are exact in float32.
            scale = scale.astype(np.float16).astype(np.float32)
        if format.startswith("nvfp4"):
            # Powers of two, with which dividing and multiplying agree.
            state["weight_global_scale"] = torch.tensor([2.0**10])
            scale = (scale * 2**10).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        state["weight_scale"] = torch.tensor(scale)
        if not args["symmetric"]:
            half = 2 ** (args["num_bits"] - 1)
            zeros = rng.integers(-half, half, shape)
            state["weight_zero_point"] = torch.tensor(zeros, dtype=torch.int8)
        scheme = QuantizationScheme(**group, format=format)
        library = BaseCompressor.get_value_from_registry(format)
        stored = library.compress(state, scheme)
        values = library.decompress(dict(stored), scheme)["weight"].float().numpy()
        return {f".{part}": _numpy(tensor) for part, tensor in stored.items()}, values

    return Format(config, write)


COMPRESSED = {
    "int8-rows": compressed("int-quantized"),
    "int8-tensor": compressed("int-quantized", strategy="tensor"),
    "int8-groups-asymmetric": compressed(
        "naive-quantized", strategy="group", group_size=32, symmetric=False
    ),
    "pack4-groups": compressed("pack-quantized", num_bits=4, strategy="group", group_size=32),
    "pack4-groups-asymmetric": compressed(
        "pack-quantized", num_bits=4, strategy="group", group_size=16, symmetric=False
    ),
    "pack4-rows": compressed("pack-quantized", num_bits=4),
    "pack8-rows-asymmetric": compressed("pack-quantized", symmetric=False),
    "pack3-groups-asymmetric": compressed(
        "pack-quantized", num_bits=3, strategy="group", group_size=32, symmetric=False
    ),
    "fp8-rows": compressed("float-quantized", type="float"),
    "fp8-tensor": compressed("float-quantized", type="float", strategy="tensor"),
    "fp8-blocks": compressed(
        "float-quantized", type="float", strategy="block", block_structure=[32, 48]
    ),
    "mxfp8": compressed("mxfp8-quantized", type="float", strategy="group", group_size=32),
    "mxfp4": compressed(
        "mxfp4-pack-quantized", type="float", num_bits=4, strategy="group", group_size=32
    ),
    "nvfp4": compressed(
        "nvfp4-pack-quantized", type="float", num_bits=4, strategy="tensor_group", group_size=16
    ),
}
