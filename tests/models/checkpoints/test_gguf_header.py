"""GGUF-07, GGUF-09 and every lie that a header can tell."""

from __future__ import annotations

import struct
import time
import tracemalloc
import zipfile

import gguf
import pytest
from gguf_files import Tiny, entry, raw_gguf, tensor_entry, text, write_gguf

from stoker.models.checkpoints.gguf_header import read_header
from stoker.models.errors import StokerError

U32, U64, STRING, ARRAY, BOOL = 4, 10, 8, 9, 7
HUGE = (1 << 64) - 1


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


ONE = tensor_entry("one", [8])

BAD = {
    "empty": (b"", "is empty"),
    "html": (b"<!DOCTYPE html><html><body>404</body></html>", "an HTML page"),
    "html_spaced": (b"\n  <html lang='en'>", "an HTML page"),
    "zip": (b"PK\x03\x04" + bytes(60), "a zip archive"),
    "safetensors": (u64(40) + b'{"a":{"dtype":"F32"}}' + bytes(40), "a safetensors file"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
    "ggml": (b"tjgg" + bytes(60), "older than GGUF"),
    "noise": (b"\x01\x02\x03\x04" * 9, "not a GGUF file"),
    "three_bytes": (b"GGU", "not a GGUF file"),
    "magic_only": (b"GGUF", "the format version needs 4 bytes"),
    "version_1": (raw_gguf(version=1), "version 1 is not supported"),
    "version_9": (raw_gguf(version=9), "version 9 is not supported"),
    "swapped": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensor_count": (raw_gguf(tensor_count=HUGE), "tensors cannot fit"),
    "tensor_count_signed": (raw_gguf(tensor_count=1 << 63), "tensors cannot fit"),
    "entry_count": (raw_gguf(entry_count=HUGE), "metadata entries cannot fit"),
    "entry_count_near": (raw_gguf(entry_count=1, data=64), "entry 0 is empty"),
    "key_length": (raw_gguf([u64(HUGE) + b"key" + bytes(20)]), "needs 18,446,744,073,709,551,615"),
    "key_long": (raw_gguf([entry("k" * 70000, U32, u32(1))]), "above the limit of 65,535"),
    "key_utf8": (raw_gguf([entry(b"k\xff", U32, u32(1))]), "is not UTF-8"),
    "key_twice": (raw_gguf([entry("k", U32, u32(1))] * 2), "'k' appears twice"),
    "value_type": (raw_gguf([entry("k", 77, u32(1))]), "unknown value type 77"),
    "value_utf8": (raw_gguf([entry("k", STRING, text(b"\xc3("))]), "'k' at byte 45 is not UTF-8"),
    "value_length": (raw_gguf([entry("k", STRING, u64(1 << 62))]), "'k' needs"),
    "bool": (raw_gguf([entry("k", BOOL, b"\x02")]), "neither 0 nor 1"),
    "array_count": (raw_gguf([entry("k", ARRAY, u32(U64) + u64(1 << 61))]), "'k' claims"),
    "array_bytes": (raw_gguf([entry("k", ARRAY, u32(U64) + u64(1 << 20))]), "'k' needs"),
    "strings_count": (raw_gguf([entry("k", ARRAY, u32(STRING) + u64(HUGE))]), "above the limit"),
    "strings_many": (
        raw_gguf([entry("k", ARRAY, u32(STRING) + u64(1 << 20))]),
        "'k' claims 1,048,576 strings",
    ),
    "strings_length": (
        raw_gguf([entry("k", ARRAY, u32(STRING) + u64(2) + text("a") + u64(HUGE) + bytes(40))]),
        "string 1 of 'k' needs",
    ),
    "strings_utf8": (
        raw_gguf([entry("k", ARRAY, u32(STRING) + u64(2) + text("a") + text(b"\xff"))]),
        "string 1 of 'k' at byte",
    ),
    "nested": (raw_gguf([entry("k", ARRAY, u32(ARRAY) + u64(1) + bytes(24))]), "array of arrays"),
    "alignment_0": (raw_gguf([entry("general.alignment", U32, u32(0))]), "not a power of two"),
    "alignment_48": (raw_gguf([entry("general.alignment", U32, u32(48))]), "not a power of two"),
    "alignment_text": (
        raw_gguf([entry("general.alignment", STRING, text("32"))]),
        "general.alignment is '32'",
    ),
    "alignment_huge": (
        raw_gguf([entry("general.alignment", U64, u64(1 << 63))], [ONE], 32),
        "the tensors need",
    ),
    "rank_0": (raw_gguf(tensors=[tensor_entry("x", [], 0, 0)], data=32), "0 dimensions"),
    "rank_5": (raw_gguf(tensors=[tensor_entry("x", [1] * 5)], data=32), "5 dimensions"),
    "rank_huge": (
        raw_gguf(tensors=[tensor_entry("x", [1], rank=0xFFFFFFFF)], data=32),
        "4,294,967,295 dimensions",
    ),
    "zero_dim": (raw_gguf(tensors=[tensor_entry("x", [32, 0])], data=32), "empty shape [0, 32]"),
    "overflowing_shape": (
        raw_gguf(tensors=[tensor_entry("x", [1 << 32, 1 << 32, 1 << 32, 4])], data=32),
        "the tensors need",
    ),
    "type": (raw_gguf(tensors=[tensor_entry("x", [32], 99)], data=32), "type 99"),
    "ragged_rows": (
        raw_gguf(tensors=[tensor_entry("x", [33, 32], 8)], data=4096),
        "33 elements, not a multiple of the 32 of a Q8_0 block",
    ),
    "unaligned": (raw_gguf(tensors=[tensor_entry("x", [4], 0, 4)], data=64), "not aligned"),
    "past_end": (raw_gguf(tensors=[tensor_entry("x", [4], 0, 64)], data=64), "needs|need"),
    "offset_wraps": (
        raw_gguf(tensors=[tensor_entry("x", [4], 0, (1 << 64) - 32)], data=64),
        "the tensors need",
    ),
    "overlap": (
        raw_gguf(tensors=[tensor_entry("a", [16]), tensor_entry("b", [16], 0, 32)], data=256),
        "'a' and 'b' overlap",
    ),
    "tensor_twice": (
        raw_gguf(tensors=[ONE, tensor_entry("one", [8], 0, 32)], data=64),
        "'one' appears twice",
    ),
    "joined": (raw_gguf(tensors=[ONE], data=32) * 2, "a second GGUF file follows"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_in_one_line_at_once(case, tmp_path):
    content, reason = BAD[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    start = time.perf_counter()
    tracemalloc.start()
    with pytest.raises(StokerError) as caught:
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    message = str(caught.value)
    assert any(part in message for part in reason.split("|")), message
    assert str(path) in message and "\n" not in message and len(message) < 300 + len(str(path))
    # Nothing is made in the size that a file claims.
    assert peak < 500_000
    assert time.perf_counter() - start < 2


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("whole") / "tiny.gguf", Tiny(), quantisation="Q8_0")


def test_header_agrees_with_the_gguf_package(whole):
    ours, theirs = read_header(whole), gguf.GGUFReader(whole)
    fields = {
        key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")
    }
    assert ours.metadata == fields
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(map(int, tensor.shape))[::-1]
        assert info.type == tensor.tensor_type
        assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)
    assert ours.file_bytes == whole.stat().st_size
    assert {type(value) for value in ours.metadata.values()} <= {str, int, float, bool, list}


def test_version_2_reads_like_version_3(whole, tmp_path):
    content = bytearray(whole.read_bytes())
    content[4:8] = u32(2)
    path = tmp_path / "old.gguf"
    path.write_bytes(content)
    old, new = read_header(path), read_header(whole)
    assert old.version == 2
    assert (old.metadata, old.tensors) == (new.metadata, new.tensors)


@pytest.mark.parametrize("alignment", [1, 8, 256])
def test_other_alignments(alignment, tmp_path):
    metadata = {"general.alignment": alignment}
    path = write_gguf(tmp_path / "a.gguf", Tiny(), metadata=metadata)
    # The writer pads to 32 bytes all the same, so only smaller powers describe what it wrote.
    if alignment > 32:
        with pytest.raises(StokerError):
            read_header(path)
    else:
        assert read_header(path).alignment == alignment


def test_every_cut_is_refused(whole, tmp_path):
    content = whole.read_bytes()
    header = read_header(whole)
    last = max(info.offset + info.nbytes for info in header.tensors.values())
    path = tmp_path / "cut.gguf"
    lengths = [0, 3, 4, 7, 8, 20, 24, 100, header.data_offset - 40, header.data_offset]
    lengths += [len(content) // 2, last - 1, *range(1000, header.data_offset, 997)]
    for length in lengths:
        path.write_bytes(content[:length])
        with pytest.raises(StokerError):
            read_header(path)
    path.write_bytes(content[: last - 1])
    with pytest.raises(StokerError, match=f"need {last:,} bytes but the file has {last - 1:,}"):
        read_header(path)


def test_big_endian_file_is_refused(tmp_path):
    path = write_gguf(tmp_path / "big.gguf", Tiny(), big_endian=True)
    with pytest.raises(StokerError, match="endian"):
        read_header(path)


def test_flipped_bytes_never_escape_as_another_exception(whole, tmp_path):
    content = whole.read_bytes()
    end = read_header(whole).data_offset
    path = tmp_path / "flipped.gguf"
    refused = 0
    for at in range(0, end, 31):
        damaged = bytearray(content)
        damaged[at] ^= 0xFF
        path.write_bytes(damaged)
        try:
            read_header(path)
        except StokerError:
            refused += 1
    assert refused > 50


def test_missing_file_folder_and_zip(tmp_path):
    with pytest.raises(StokerError, match="No such file"):
        read_header(tmp_path / "none.gguf")
    with pytest.raises(StokerError, match="cannot be read"):
        read_header(tmp_path)
    with zipfile.ZipFile(tmp_path / "pytorch.gguf", "w") as archive:
        archive.writestr("data.pkl", b"x")
    with pytest.raises(StokerError, match="zip archive"):
        read_header(tmp_path / "pytorch.gguf")


def test_hostile_strings_in_a_large_sparse_file_stay_out_of_memory(tmp_path):
    path = tmp_path / "sparse.gguf"
    count = 1 << 32
    path.write_bytes(raw_gguf([entry("k", ARRAY, u32(STRING) + u64(count))], tensor_count=0))
    with open(path, "r+b") as file:
        file.truncate(1 << 36)
    with pytest.raises(StokerError, match="'k' claims 4,294,967,296 elements"):
        read_header(path)
