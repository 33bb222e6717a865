"""What a pre-quantised checkpoint says and Stoker does not do is refused by name."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from stoker.models.checkpoints.prequantised import METHODS, open_prequantised
from stoker.models.errors import StokerError

I32, F16, F32 = np.int32, np.float16, np.float32
E4M3 = ml_dtypes.float8_e4m3fn
Tensors = dict[str, np.ndarray]

#: 64 inputs and 16 outputs of a module "a.up_proj" in groups of 32.
AWQ: Tensors = {
    "qweight": np.zeros((64, 2), I32),
    "qzeros": np.zeros((2, 2), I32),
    "scales": np.ones((2, 16), F16),
}
GPTQ: Tensors = {
    "qweight": np.zeros((8, 16), I32),
    "qzeros": np.zeros((2, 2), I32),
    "scales": np.ones((2, 16), F16),
}
FP8: Tensors = {"weight": np.ones((16, 64), E4M3), "weight_scale_inv": np.ones((1, 2), F32)}
PACKED: Tensors = {
    "weight_packed": np.zeros((16, 8), I32),
    "weight_scale": np.ones((16, 2), F16),
    "weight_shape": np.array([16, 64]),
}
INT8: Tensors = {"weight": np.zeros((16, 64), np.int8), "weight_scale": np.ones((16, 1), F32)}
NVFP4: Tensors = {
    "weight_packed": np.zeros((16, 32), np.uint8),
    "weight_scale": np.ones((16, 4), E4M3),
    "weight_global_scale": np.ones(1, F32),
}
MXFP4: Tensors = {
    "up_proj_blocks": np.zeros((2, 16, 2, 16), np.uint8),
    "up_proj_scales": np.zeros((2, 16, 2), np.uint8),
}
AWQ_SETTINGS = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
GPTQ_SETTINGS = {"quant_method": "gptq", "bits": 4, "group_size": 32}
FP8_SETTINGS = {"quant_method": "fp8", "weight_block_size": [32, 32]}


def compressed(
    format: str = "pack-quantized", group: Any = None, weights: Any = None, **more: Any
) -> dict[str, Any]:
    """Settings with changes to the only group, to its weights, and to the whole."""
    args = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    targets = {"targets": ["Linear"], "weights": args | (weights or {}), **(group or {})}
    base = {"quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"]}
    return {**base, "quantization_status": "compressed", "config_groups": {"g": targets}, **more}


INT8_SETTINGS = compressed("int-quantized", weights={"num_bits": 8, "strategy": "channel"})
NVFP4_SETTINGS = compressed(
    "nvfp4-pack-quantized", weights={"type": "float", "strategy": "tensor_group", "group_size": 16}
)
#: What loads, and what the changes below are changes to.
GOOD = {
    "awq": (AWQ_SETTINGS, AWQ),
    "gptq": (GPTQ_SETTINGS, GPTQ),
    "fp8": (FP8_SETTINGS | {"weight_block_size": [16, 32]}, FP8),
    "packed": (compressed(), PACKED),
    "int8": (INT8_SETTINGS, INT8),
    "nvfp4": (NVFP4_SETTINGS, NVFP4),
    "mxfp4": ({"quant_method": "mxfp4"}, MXFP4),
}
#: Settings with the keys that published models have.
PUBLISHED: dict[str, tuple[Any, Tensors]] = {
    "autoawq": (AWQ_SETTINGS | {"modules_to_not_convert": None, "zero_point": True}, AWQ),
    "transformers_gptq": (
        {
            **GPTQ_SETTINGS,
            "batch_size": 1,
            "block_name_to_quantize": None,
            "cache_block_outputs": True,
            "damp_percent": 0.01,
            "dataset": None,
            "desc_act": False,
            "sym": True,
            "exllama_config": {"version": 1},
            "use_exllama": True,
            "true_sequential": True,
        },
        GPTQ,
    ),
    "gptqmodel": (
        {
            **GPTQ_SETTINGS,
            "checkpoint_format": "gptq",
            "lm_head": False,
            "pack_dtype": "int32",
            "meta": {"quantizer": ["gptqmodel:2.0.0"], "damp_percent": 0.1},
            "dynamic": None,
        },
        GPTQ | {"g_idx": (np.arange(64) // 32).astype(I32), "bias": np.ones(16, F16)},
    ),
    "fp8": (
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [16, 32],
            "scale_fmt": "ue8m0",
            "modules_to_not_convert": ["lm_head", "a.input_layernorm", "a.up"],
        },
        FP8,
    ),
    "w4a16": (
        compressed(
            group={"input_activations": None, "output_activations": None},
            weights={
                "actorder": "weight",
                "block_structure": None,
                "dynamic": False,
                "observer": "minmax",
                "observer_kwargs": {},
            },
            global_compression_ratio=1.9,
            kv_cache_scheme=None,
        ),
        PACKED,
    ),
    "fp8_static_cache": (
        compressed(
            "float-quantized",
            group={"input_activations": {"num_bits": 8, "dynamic": False, "strategy": "tensor"}},
            weights={"num_bits": 8, "type": "float", "strategy": "tensor", "group_size": None},
            kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor"},
            sparsity_config={"format": "dense", "global_sparsity": 0.1, "targets": []},
            version="0.6.0",
        ),
        {
            "weight": FP8["weight"],
            **{name: np.ones(1, F32) for name in ("weight_scale", "input_scale", "output_scale")},
            **{name: np.ones(1, F32) for name in ("k_scale", "v_scale")},
        },
    ),
}
ORDER = np.roll(np.arange(64) // 32, 1).astype(I32)
WRONG: dict[str, tuple[Any, Tensors, str]] = {
    "no_object": ("awq", AWQ, "not an object"),
    "no_method": ({"bits": 4}, AWQ, "no 'quant_method'"),
    **{
        method: ({"quant_method": method}, AWQ, f"quant_method is '{method}'")
        for method in ("bitsandbytes", "torchao", "hqq", "quanto", "aqlm", "modelopt")
    },
    "awq_bits": (AWQ_SETTINGS | {"bits": 8}, AWQ, "'bits' is 8"),
    "awq_gemv": (AWQ_SETTINGS | {"version": "gemv"}, AWQ, "'version' is 'gemv'"),
    "awq_backend": (AWQ_SETTINGS | {"backend": "llm-awq"}, AWQ, "'backend' is 'llm-awq'"),
    "awq_key": (AWQ_SETTINGS | {"rotation": "x"}, AWQ, "quant_method 'awq' does not know"),
    "awq_group": (AWQ_SETTINGS | {"group_size": 48}, AWQ, "64 inputs, which do not divide"),
    "awq_group_text": (AWQ_SETTINGS | {"group_size": "x"}, AWQ, "'group_size' must be"),
    "awq_spared": (
        AWQ_SETTINGS | {"modules_to_not_convert": ["a.up_proj"]},
        AWQ,
        "spares 'a.up_proj'",
    ),
    "awq_zeros": (AWQ_SETTINGS, AWQ | {"qzeros": np.zeros((2, 3), I32)}, "[2, 3]"),
    "awq_no_scales": (AWQ_SETTINGS, {k: AWQ[k] for k in ("qweight", "qzeros")}, "lacks"),
    "awq_scales": (AWQ_SETTINGS, AWQ | {"scales": np.ones((2, 16), I32)}, "has type I32"),
    "awq_twice": (AWQ_SETTINGS, AWQ | {"weight": np.ones((16, 64), F16)}, "both quantised and"),
    "awq_stray": (AWQ_SETTINGS, AWQ | {"stray": np.ones(1, I32)}, "'a.up_proj.stray' has type"),
    "gptq_bits": (GPTQ_SETTINGS | {"bits": 5}, GPTQ, "'bits' is 5"),
    "gptq_marlin": (GPTQ_SETTINGS | {"checkpoint_format": "marlin"}, GPTQ, "is 'marlin'"),
    "gptq_is_marlin": (GPTQ_SETTINGS | {"is_marlin_format": True}, GPTQ, "is_marlin_format"),
    "gptq_dynamic": (GPTQ_SETTINGS | {"dynamic": {"+:x": {"bits": 8}}}, GPTQ, "'dynamic'"),
    "gptq_order": (GPTQ_SETTINGS | {"desc_act": True}, GPTQ | {"g_idx": ORDER}, "act-order"),
    "gptq_vector": (GPTQ_SETTINGS, GPTQ | {"qweight": np.zeros(8, I32)}, "must be a matrix"),
    "fp8_no_scale": (FP8_SETTINGS, {"weight": FP8["weight"]}, "lacks tensor 'a.up_proj.weight_s"),
    "fp8_blocks": (FP8_SETTINGS | {"weight_block_size": [8, 8]}, FP8, "needs [2, 8] or"),
    "fp8_block_text": (FP8_SETTINGS | {"weight_block_size": [8]}, FP8, "must be two sizes"),
    "fp8_experts": (FP8_SETTINGS | {"expert_dtype": "fp4"}, FP8, "'expert_dtype' is 'fp4'"),
    "fp8_key": (FP8_SETTINGS | {"shift": 1.5}, FP8, "quant_method 'fp8' does not know 'shift'"),
    "ct_status": (compressed(quantization_status="frozen"), PACKED, "'quantization_status'"),
    "ct_format": (compressed("marlin-24"), PACKED, "'format' is 'marlin-24'"),
    "ct_sparse": (
        compressed(sparsity_config={"format": "sparse-24-bitmask"}),
        PACKED,
        "sparsity_config: 'format'",
    ),
    "ct_transform": (compressed(transform_config={"u": 1}), PACKED, "'transform_config'"),
    "ct_moe_sparse": (compressed(moe_sparsity_config={"a": 1}), PACKED, "moe_sparsity_config"),
    "ct_ignored": (compressed(ignore=["re:.*up_proj"]), PACKED, "spares 're:.*up_proj'"),
    "ct_pattern": (compressed(ignore=["re:("]), PACKED, "no regular expression"),
    "ct_targets": (compressed(group={"targets": ["re:b"]}), PACKED, "no target"),
    "ct_group_key": (compressed(group={"rotate": 1}), PACKED, "'rotate'"),
    "ct_dynamic": (compressed(weights={"dynamic": True}), PACKED, "'dynamic' is True"),
    "ct_bits": (compressed(weights={"num_bits": 9}), PACKED, "9 bits"),
    "ct_strategy": (compressed(weights={"strategy": "token"}), PACKED, "'strategy' is 'token'"),
    "ct_type": (compressed(weights={"type": "float"}), PACKED, "'type' is 'float'"),
    "ct_weights_key": (compressed(weights={"codebook": 3}), PACKED, "'codebook'"),
    "ct_order": (compressed(), PACKED | {"weight_g_idx": ORDER}, "act-order"),
    "ct_shape": (compressed(), PACKED | {"weight_shape": np.array([16, 96])}, "[16, 12]"),
    "ct_other": (INT8_SETTINGS, PACKED, "are not those of int-quantized"),
    "ct_zero": (
        compressed("int-quantized", weights={"num_bits": 8, "symmetric": False}),
        INT8 | {"weight_scale": np.ones((16, 2), F32)},
        "lacks tensor 'a.up_proj.weight_zero_point'",
    ),
    "ct_asymmetric_floats": (
        compressed("float-quantized", weights={"type": "float", "num_bits": 8, "symmetric": False}),
        FP8,
        "'symmetric' is False",
    ),
    "nvfp4_group": (
        compressed("nvfp4-pack-quantized", weights={"type": "float", "group_size": 24}),
        NVFP4,
        "64 inputs in groups of 24",
    ),
    "mxfp4_blocks": (
        {"quant_method": "mxfp4"},
        MXFP4 | {"up_proj_blocks": np.zeros((2, 16, 2, 8), np.uint8)},
        "blocks of 16 bytes",
    ),
}


def written(folder, settings: Any, tensors: Tensors):
    """Opens a checkpoint of one module."""
    prefix = "a." if "up_proj_blocks" in tensors else "a.up_proj."
    stored = {prefix + name: tensor for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    return open_prequantised(folder, settings)


@pytest.mark.parametrize("name", GOOD)
def test_what_the_refusals_start_from_loads(name: str, tmp_path) -> None:
    checkpoint = written(tmp_path, *GOOD[name])
    (tensor,) = checkpoint.tensors
    assert checkpoint.load(tensor).shape == checkpoint.tensors[tensor].shape


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings_load(name: str, tmp_path) -> None:
    checkpoint = written(tmp_path, *PUBLISHED[name])
    assert set(checkpoint.tensors) - {"a.up_proj.bias"} == {"a.up_proj.weight"}
    assert checkpoint.load("a.up_proj.weight").shape == (16, 64)


@pytest.mark.parametrize("name", WRONG)
def test_a_refusal_names_what_it_is_about(name: str, tmp_path) -> None:
    settings, tensors, reason = WRONG[name]
    with pytest.raises(StokerError) as caught:
        written(tmp_path, settings, tensors)
    message = str(caught.value)
    assert reason in message and "\n" not in message and len(message) < 400, message


def test_an_unknown_method_is_told_the_known_ones(tmp_path) -> None:
    with pytest.raises(StokerError, match=", ".join(METHODS)):
        written(tmp_path, {"quant_method": "quanto"}, AWQ)


def test_groups_that_are_as_they_were_need_no_order(tmp_path) -> None:
    for index in (np.arange(64) // 32, np.full(64, -1), np.zeros(0)):
        checkpoint = written(tmp_path, GPTQ_SETTINGS, GPTQ | {"g_idx": index.astype(I32)})
        assert set(checkpoint.tensors) == {"a.up_proj.weight"}


def test_names_go_before_patterns_and_patterns_before_classes(tmp_path) -> None:
    def bits(*targets: str) -> int:
        groups = {
            str(bits): compressed(group={"targets": [it]}, weights={"num_bits": bits})
            for bits, it in zip((8, 4), targets, strict=True)
        }
        groups = {name: it["config_groups"]["g"] for name, it in groups.items()}
        packed = {k: np.tile(v, (1, 2)) if k == "weight_packed" else v for k, v in PACKED.items()}
        for tensors in (PACKED, packed):
            try:
                written(tmp_path, compressed(config_groups=groups), tensors)
            except StokerError:
                continue
            return 4 if tensors is PACKED else 8
        raise AssertionError("neither fits")

    assert bits("Linear", "re:.*up_proj") == 4
    assert bits("re:.*up_proj", "Linear") == 8
    assert bits("re:.*", "a.up_proj") == 4
