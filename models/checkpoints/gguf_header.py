"""A strict, bounded walk over the header of a GGUF file (version 2 or 3, little-endian).

The `gguf` package's own reader is not used: on a vocabulary of 98,000 strings it takes seconds and
over 100 MB of small views, it follows any count that a file claims, and it checks no bounds. Its
constants are. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import mmap
import os
import pathlib
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFValueType,
    Keys,
)

from ..errors import StokerError

VERSIONS = (2, 3)
#: Real headers take a few MB and hold lists of up to 300,000 elements or so. These limits keep a
#: hostile file's out of memory.
HEADER_LIMIT = 128 << 20
ELEMENT_LIMIT = 4 << 20
KEY_LIMIT = (1 << 16) - 1
MAGIC = b"GGUF"

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SCALARS: dict[int, np.dtype[Any]] = {
    GGUFValueType.UINT8: np.dtype("u1"),
    GGUFValueType.INT8: np.dtype("i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("u1"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}
# The fewest bytes that a metadata entry and a tensor entry can take.
_ENTRY_BYTES, _TENSOR_BYTES = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8
#: First bytes of files that are mistaken for GGUF, and what to call them.
_LOOKALIKES = (
    (b"<!doctype html", "an HTML page (perhaps a failed download)"),
    (b"<html", "an HTML page (perhaps a failed download)"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself"),
    (b"pk\x03\x04", "a zip archive (perhaps a PyTorch checkpoint or a wheel)"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x93numpy", "a NumPy file"),
    (b"fugg", "a GGUF file of the other endianness"),
    (b"ggjt", "a GGML file older than GGUF"),
    (b"tjgg", "a GGML file older than GGUF"),
    (b"lmgg", "a GGML file older than GGUF"),
)


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and what it holds.

    Attributes:
      name: as the file spells it.
      shape: NumPy order, so a matrix is `[outputs, inputs]` (the file lists it reversed).
      type: the GGML type of its blocks.
      offset: bytes from the start of the file.
      nbytes: bytes in the file.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    nbytes: int

    @property
    def quantised(self) -> bool:
        """Whether its elements come in blocks."""
        return self.unit > 1

    @property
    def unit(self) -> int:
        """Elements of a row to a block: only blocks are read."""
        return GGML_QUANT_SIZES[self.type][0]


@dataclasses.dataclass(frozen=True)
class GGUFHeader:
    """All that a GGUF file says before its tensor data.

    Attributes:
      path: of the file.
      version: 2 or 3.
      metadata: keys to plain values: str, int, float, bool or a list of one of these.
      tensors: by name, in the file's order.
      alignment: of tensor data, bytes.
      data_offset: where tensor data starts, bytes.
      file_bytes: size of the file.
    """

    path: pathlib.Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    alignment: int
    data_offset: int
    file_bytes: int


@contextlib.contextmanager
def open_mapped(path: pathlib.Path) -> Iterator[tuple[mmap.mmap, int]]:
    """The file mapped read-only, and its size; an empty or unreadable file is a `StokerError`.

    The map stays open for as long as something holds a view of it.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise StokerError(f"'{path}' is empty, not a GGUF file; download it again")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise StokerError(
            f"'{path}' cannot be read ({error.strerror or error}); give a readable GGUF file"
        ) from None
    yield data, size


def read_header(path: str | os.PathLike[str]) -> GGUFHeader:
    """Reads and checks the header of one GGUF file; no tensor data is touched.

    Every count, length and offset is compared with the file's size before anything of that size
    is made. Raises `StokerError` for a file that is not GGUF, is big-endian, cut off or damaged.
    """
    path = pathlib.Path(path)
    with open_mapped(path) as (data, size), data:
        return _Walk(path, data, size).header()


class _Walk:
    """A cursor over the mapped file; every advance is checked."""

    def __init__(self, path: pathlib.Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size, self.at = path, data, size, 0

    def fail(self, problem: str, advice: str = "it is damaged: download it again") -> StokerError:
        # A damaged name may be as long as the file.
        return StokerError(f"'{self.path}': {problem:.300}; {advice}")

    def take(self, count: int, what: str) -> int:
        """Advances by `count` bytes; returns where they start."""
        start, end = self.at, self.at + count
        if end > self.size:
            raise self.fail(
                f"{what} needs {count:,} bytes at byte {start:,} but the file has {self.size:,}",
                "it is cut off or damaged: download it again",
            )
        if end > HEADER_LIMIT:
            raise self.fail(f"{what} would make the header larger than {HEADER_LIMIT:,} bytes")
        self.at = end
        return start

    def number(self, kind: struct.Struct, what: str) -> int:
        return kind.unpack_from(self.data, self.take(kind.size, what))[0]

    def text(self, what: str, limit: int = HEADER_LIMIT) -> str:
        length = self.number(_U64, what)
        if length > limit and length <= self.size:
            raise self.fail(f"{what} is {length:,} bytes long, above the limit of {limit:,}")
        start = self.take(length, what)
        return self.decode(start, self.at, what)

    def decode(self, start: int, end: int, what: str) -> str:
        try:
            return self.data[start:end].decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} at byte {start:,} is not UTF-8") from None

    def header(self) -> GGUFHeader:
        version = self.version()
        tensor_count = self.count(_TENSOR_BYTES, "tensors")
        entry_count = self.count(_ENTRY_BYTES, "metadata entries")
        metadata = self.metadata(entry_count)
        alignment = metadata.get(Keys.General.ALIGNMENT, GGUF_DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self.fail(f"{Keys.General.ALIGNMENT} is {alignment!r:.40}, not a power of two")
        described = [self.tensor() for _ in range(tensor_count)]
        data_offset = -(-self.at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for info in described:
            if info.name in tensors:
                raise self.fail(f"tensor '{info.name}' appears twice")
            tensors[info.name] = dataclasses.replace(info, offset=info.offset + data_offset)
        self.check_ranges(list(tensors.values()), data_offset, alignment)
        return GGUFHeader(self.path, version, metadata, tensors, alignment, data_offset, self.size)

    def version(self) -> int:
        start = self.data[: min(self.size, 64)]
        if start[:4] != MAGIC:
            raise self.fail(f"this is not a GGUF file but {_describe(start)}", "give a GGUF file")
        self.at = len(MAGIC)
        version = self.number(_U32, "the format version")
        # Swapped, a small number has nothing in its lower half.
        if version and not version & 0xFFFF:
            raise self.fail("this is a big-endian GGUF file", "give one of little endianness")
        if version not in VERSIONS:
            known = " and ".join(map(str, VERSIONS))
            raise self.fail(f"GGUF version {version} is not supported", f"versions {known} are")
        return version

    def count(self, least: int, what: str) -> int:
        count = self.number(_U64, f"the number of {what}")
        if count > (min(self.size, HEADER_LIMIT) - self.at) // least:
            raise self.fail(f"{count:,} {what} cannot fit into the file's {self.size:,} bytes")
        return count

    def metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for index in range(count):
            key = self.text(f"the key of metadata entry {index}", KEY_LIMIT)
            if not key:
                raise self.fail(f"the key of metadata entry {index} is empty")
            if key in metadata:
                raise self.fail(f"metadata key '{key}' appears twice")
            kind = self.number(_U32, f"the type of '{key}'")
            if kind == GGUFValueType.STRING:
                metadata[key] = self.text(f"'{key}'")
            elif kind == GGUFValueType.ARRAY:
                metadata[key] = self.array(key)
            else:
                metadata[key] = self.scalars(kind, 1, key)[0]
        return metadata

    def array(self, key: str) -> list[Any]:
        kind = self.number(_U32, f"the element type of '{key}'")
        count = self.number(_U64, f"the length of '{key}'")
        if kind == GGUFValueType.ARRAY:
            raise self.fail(f"'{key}' is an array of arrays", "no model that is supported has one")
        if count > ELEMENT_LIMIT:
            raise self.fail(
                f"'{key}' claims {count:,} elements, above the limit of {ELEMENT_LIMIT:,}"
            )
        if kind == GGUFValueType.STRING:
            return self.strings(count, key)
        return self.scalars(kind, count, key)

    def scalars(self, kind: int, count: int, key: str) -> list[Any]:
        if kind not in _SCALARS:
            raise self.fail(f"'{key}' has the unknown value type {kind}")
        dtype = _SCALARS[kind]
        start = self.take(count * dtype.itemsize, f"'{key}'")
        values = np.frombuffer(self.data[start : self.at], dtype)
        if kind != GGUFValueType.BOOL:
            return values.tolist()
        if (values > 1).any():
            raise self.fail(f"'{key}' has a truth value that is neither 0 nor 1")
        return (values == 1).tolist()

    def strings(self, count: int, key: str) -> list[str]:
        if count > (self.size - self.at) // 8:
            raise self.fail(f"'{key}' claims {count:,} strings, more than the file can hold")
        # The one long loop: `take` and `decode` written out, which halves its time.
        data, at, size, unpack = self.data, self.at, min(self.size, HEADER_LIMIT), _U64.unpack_from
        values = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + unpack(data, at)[0]
                if at > size:
                    break
                values.append(data[start:at].decode("utf-8"))
        except (struct.error, UnicodeDecodeError):
            pass
        if len(values) < count:
            # Walk again with the checks that name what is wrong.
            for index in range(count):
                self.text(f"string {index} of '{key}'")
        self.at = at
        return values

    def tensor(self) -> TensorInfo:
        """One tensor's entry; its offset is still relative to the tensor data."""
        name = self.text("a tensor name", KEY_LIMIT)
        what = f"the entry of tensor '{name}'"
        rank = self.number(_U32, what)
        if not 1 <= rank <= 4:
            raise self.fail(f"tensor '{name}' has {rank:,} dimensions, not 1 to 4")
        shape = tuple(self.number(_U64, what) for _ in range(rank))[::-1]
        number, offset = self.number(_U32, what), self.number(_U64, what)
        if 0 in shape:
            raise self.fail(f"tensor '{name}' has the empty shape {list(shape)}")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise self.fail(
                f"tensor '{name}' has type {number}, which is not known",
                "give a file quantised to another type, such as Q8_0 or Q4_K",
            ) from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise self.fail(
                f"rows of tensor '{name}' have {shape[-1]:,} elements, not a multiple of the "
                f"{block} of a {kind.name} block"
            )
        return TensorInfo(name, shape, kind, offset, math.prod(shape) // block * block_bytes)

    def check_ranges(self, tensors: list[TensorInfo], start: int, alignment: int) -> None:
        ordered = sorted(tensors, key=lambda info: info.offset)
        for info in ordered:
            if (info.offset - start) % alignment:
                raise self.fail(f"tensor '{info.name}' is not aligned to {alignment} bytes")
        for info, following in itertools.pairwise(ordered):
            if info.offset + info.nbytes > following.offset:
                raise self.fail(f"tensors '{info.name}' and '{following.name}' overlap")
        end = max((info.offset + info.nbytes for info in tensors), default=self.at)
        if end > self.size:
            raise self.fail(
                f"the tensors need {end:,} bytes but the file has {self.size:,}",
                "it is cut off: download it again",
            )
        # Writers may pad the last tensor or not, so the next file starts at either place.
        for at in (end, -(-end // alignment) * alignment):
            if self.data[at : at + 4] == MAGIC:
                raise self.fail(
                    "a second GGUF file follows the first one",
                    "keep split files apart, under their own names",
                )


def _describe(start: bytes) -> str:
    """What a file that begins with `start` looks like."""
    lowered = start.lstrip().lower()
    for prefix, description in _LOOKALIKES:
        if lowered.startswith(prefix):
            return description
    if start[8:9] == b"{":
        return "a safetensors file"
    return f"something that begins with {start[:4]!r}"
