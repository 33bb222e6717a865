"""STF-01, STF-04: hostile headers, every type, sharded models; written by the library itself."""

from __future__ import annotations

import json
import struct
import time

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from stoker.models.checkpoints.safetensors import FILE, INDEX, SafetensorsCheckpoint
from stoker.models.errors import StokerError

PAIR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def raw(header, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


HOSTILE = {
    "length_2^63": raw({}, length=2**63),
    "length_past_the_end": raw({}, length=1000),
    "begin_after_end": raw({"a": {**PAIR, "data_offsets": [8, 0]}}, bytes(8)),
    "end_past_the_file": raw({"a": PAIR}, bytes(4)),
    "shape": raw({"a": {**PAIR, "shape": [1000, 1000], "data_offsets": [0, 4]}}, bytes(4)),
    "overlap": raw({"a": PAIR, "b": {**PAIR, "data_offsets": [4, 12]}}, bytes(12)),
    "gap": raw({"a": PAIR}, bytes(16)),
    "twice": raw(f'{{"a": {json.dumps(PAIR)}, "a": {json.dumps(PAIR)}}}'.encode(), bytes(8)),
    "dtype_X9": raw({"a": {**PAIR, "dtype": "X9"}}, bytes(8)),
    "deep": raw(b"[" * 100_000),
    "html": b"<html><body>not found</body></html>",
    "empty": b"",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_quickly(case, tmp_path):
    (tmp_path / FILE).write_bytes(HOSTILE[case])
    start = time.perf_counter()
    with pytest.raises(StokerError) as caught:
        SafetensorsCheckpoint.open(tmp_path)
    assert time.perf_counter() - start < 1
    message = str(caught.value)
    assert FILE in message and "\n" not in message and len(message) < 300


def test_header_keys_may_be_in_any_order(tmp_path):
    header = {"b": {**PAIR, "data_offsets": [8, 16]}, "a": PAIR}
    (tmp_path / FILE).write_bytes(raw(header, np.arange(4, dtype="<f4").tobytes()))
    checkpoint = SafetensorsCheckpoint.open(tmp_path)
    np.testing.assert_array_equal(checkpoint.load("a"), [0, 1])
    np.testing.assert_array_equal(checkpoint.load("b"), [2, 3])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_type_keeps_its_values_small_and_large(dtype, tmp_path):
    rng = np.random.default_rng(0)
    arrays = {"small": rng.normal(size=(2, 2)), "large": rng.normal(size=(1024, 2048))}
    stored = {name: array.astype(dtype) for name, array in arrays.items()}
    save_file(stored, tmp_path / FILE, metadata={"format": "pt"})
    checkpoint = SafetensorsCheckpoint.open(tmp_path)
    assert checkpoint.file_bytes == (tmp_path / FILE).stat().st_size
    for name, array in stored.items():
        for _ in range(2):
            loaded = checkpoint.load(name)
            assert loaded.dtype == dtype and loaded.ctypes.data % 64 == 0
            np.testing.assert_array_equal(loaded, array)
            checkpoint.release(name)
    np.testing.assert_array_equal(checkpoint.load("large", slice(5, 9)), stored["large"][5:9])


def test_another_type_is_named(tmp_path):
    save_file({"a.weight": np.zeros(4, ml_dtypes.float8_e4m3fn)}, tmp_path / FILE)
    with pytest.raises(StokerError, match=r"'a\.weight' has type F8_E4M3"):
        SafetensorsCheckpoint.open(tmp_path)


def sharded(folder, **weight_map):
    """Two shards, and an index of what the test says."""
    save_file({"a": np.ones(2, np.float32)}, folder / "one.safetensors")
    save_file({"b": np.zeros(2, np.float32)}, folder / "two.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_shards_are_those_of_the_index(tmp_path):
    save_file({"stray": np.ones(1, np.float32)}, tmp_path / FILE)
    folder = sharded(tmp_path, a="one.safetensors", b="two.safetensors")
    checkpoint = SafetensorsCheckpoint.open(folder)
    assert set(checkpoint.tensors) == {"a", "b"} and len(checkpoint.paths) == 2
    assert checkpoint.load("a")[0] == 1 and checkpoint.load("b")[0] == 0


BAD_INDEX = {
    "elsewhere": ({"a": "two.safetensors", "b": "two.safetensors"}, "does not place there|lacks"),
    "lacking": ({"a": "one.safetensors", "b": "two.safetensors", "c": "one.safetensors"}, "'c'"),
    "unlisted": ({"a": "one.safetensors", "x": "two.safetensors"}, "holds tensor 'b'"),
    "no_shard": ({"a": "one.safetensors", "b": "three.safetensors"}, "three.safetensors"),
    "outside": ({"a": "../one.safetensors"}, "not a file next to it"),
    "number": ({"a": 1}, "not a file next to it"),
    "empty": ({}, "no weight_map"),
}


@pytest.mark.parametrize("case", BAD_INDEX)
def test_a_wrong_index_is_named(case, tmp_path):
    weight_map, reason = BAD_INDEX[case]
    with pytest.raises(StokerError) as caught:
        SafetensorsCheckpoint.open(sharded(tmp_path, **weight_map))
    assert any(part in str(caught.value) for part in reason.split("|")), str(caught.value)
