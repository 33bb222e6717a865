"""Every block type, value for value, against the `gguf` package's dequantisation."""

from __future__ import annotations

import tracemalloc

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from stoker.models.checkpoints.gguf_blocks import (
    SUPPORTED_TYPES,
    blocks_of,
    check_types,
    convert,
)
from stoker.models.checkpoints.gguf_header import TensorInfo
from stoker.models.errors import StokerError
from stoker.models.host_arrays import aligned_empty
from stoker.models.quantized import QuantArray, dequantize

DENSE = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
QUANTISED = [name for name in SUPPORTED_TYPES if name not in DENSE]
#: Bytes at which a block keeps its float16 numbers.
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "MXFP4": [],
}
# Subnormal, tiny, negative, zero, largest.
EDGES = np.array([6e-8, -6e-8, 5.9e-5, -1.5, 0.0, -0.0, 65504.0, 0.0123], np.float16)


def random_blocks(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Raw bytes `[..., row_bytes]` of random codes and finite scales, some of them at the edges."""
    rng = np.random.default_rng(seed)
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, block_bytes), dtype=np.uint8)
    if name == "MXFP4":  # powers of two whose products are neither subnormal nor infinite
        raw[..., 0] = rng.integers(3, 250, raw.shape[:-1])
    for at in HALVES[name]:
        halves = rng.normal(0, 0.1, raw.shape[:-1]).astype(np.float16)
        edge = rng.random(halves.shape) < 0.3
        halves = np.where(edge, rng.choice(EDGES, halves.shape), halves)
        raw[..., at : at + 2] = halves[..., None].view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


def converted(raw: np.ndarray, name: str, shape: tuple[int, ...]):
    info = TensorInfo("x", shape, GGMLQuantizationType[name], 0, raw.nbytes)
    return convert(blocks_of(raw, info), info.type)


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("lead, blocks", [((1,), 1), ((1,), 3), ((5,), 1), ((7,), 4), ((2, 3), 2)])
def test_values_equal_the_reference(name, lead, blocks):
    block, _ = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    shape = (*lead, blocks * block)
    raw = random_blocks(name, shape, seed=blocks)
    array = converted(raw.reshape(-1), name, shape)
    assert isinstance(array, QuantArray) and array.shape == shape
    want = gguf.quants.dequantize(raw, GGMLQuantizationType[name])
    got = np.asarray(dequantize(jax.tree.map(jnp.asarray, array)))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", QUANTISED)
def test_chunks_do_not_show(name, monkeypatch):
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    shape = (11, 2 * block)
    raw = random_blocks(name, shape, seed=5)
    whole = converted(raw.reshape(-1), name, shape)
    # Two rows at a time, and one left over.
    monkeypatch.setattr("stoker.models.checkpoints.gguf_blocks.CHUNK_BYTES", 4 * block_bytes)
    chunked = converted(raw.reshape(-1), name, shape)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(chunked), strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.ctypes.data % 64 == 0
    part = convert(raw.reshape(11, 2, block_bytes)[3:8, 1:], GGMLQuantizationType[name])
    np.testing.assert_array_equal(dequantize(part), dequantize(whole)[3:8, block:])


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_memory_stays_near_the_files_size(name):
    shape = (8192, 2048)
    raw = random_blocks(name, shape, seed=1)
    tracemalloc.start()
    array = converted(raw.reshape(-1), name, shape)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # 8-bit codes of a 6-bit format are a third larger than the file; the rest is what is in flight.
    assert kept < raw.nbytes * (1.4 if name == "Q6_K" else 1.1)
    assert array.nbytes <= kept
    assert peak - kept < 40e6 < np.prod(shape) * 4


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("shape", [(3,), (5, 7), (300, 1100)])
def test_dense_types_keep_their_own_precision(name, shape):
    # Two elements that take bulk and small paths alike must come through unrounded.
    values = np.random.default_rng(2).normal(size=shape).astype(DENSE[name])
    raw = values.reshape(-1).view(np.uint8)
    array = converted(raw, name, shape)
    assert array.dtype == DENSE[name] and array.shape == shape
    np.testing.assert_array_equal(array.view(np.uint8), values.view(np.uint8))
    assert not np.shares_memory(array, raw)
    on_device = jax.device_put(array)
    assert on_device.dtype == DENSE[name]


def test_supported_types_are_those_that_convert():
    known = {kind.name for kind in GGMLQuantizationType}
    assert len(SUPPORTED_TYPES) == 14 and set(SUPPORTED_TYPES) < known


@pytest.mark.parametrize("name", ["IQ4_NL", "TQ1_0", "NVFP4", "F64", "I8", "Q8_1"])
def test_other_types_are_named(name):
    tensors = [
        TensorInfo("good", (32,), GGMLQuantizationType.Q8_0, 0, 34),
        TensorInfo("blk.0.bad", (256,), GGMLQuantizationType[name], 0, 1),
    ]
    with pytest.raises(StokerError, match=rf"'blk\.0\.bad' has type {name}.*Q8_0.*Q6_K"):
        check_types(tensors)


def test_aligned_buffers_are_adopted_by_jax_without_a_copy():
    array = aligned_empty((64, 33), np.dtype(np.float32))
    array[:] = 1
    assert jax.device_put(array, jax.devices("cpu")[0]).unsafe_buffer_pointer() == array.ctypes.data
