"""A safetensors checkpoint: `model.safetensors`, or the shards that an index names.

The `safetensors` library checks each header: lengths, types, shapes and that the tensors cover the
file without a gap or an overlap. Data is read here, through maps whose pages can be given back.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import pathlib
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from ..errors import StokerError
from ..host_arrays import aligned_empty
from ..json_files import read_json

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: Types of elements by the names that the format has for them.
TYPES: Mapping[str, np.dtype] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}
#: Bytes that are copied before their pages are given back.
_COPY_BYTES = 32 << 20
#: Types of tensors that need no explanation.
FLOATS = ("F32", "F16", "BF16")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies.

    Attributes:
      name: as the file has it.
      dtype: as the file spells it; one of `TYPES` once the checkpoint is open.
      shape: row-major.
      offset: of its first byte in the file.
      nbytes: its size.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def numpy_type(self) -> np.dtype:
        """The type of its elements."""
        return TYPES[self.dtype]

    @property
    def quantised(self) -> bool:
        """Never: quantised matrices are made of several tensors, and called by another class."""
        return False

    @property
    def unit(self) -> int:
        """Columns that can only be read together: each by itself."""
        return 1


@dataclasses.dataclass(frozen=True)
class SafetensorsCheckpoint:
    """The tensors of one model; nothing is read before `load`.

    Attributes:
      paths: its files.
      tensors: of all files, by name.
      file_bytes: of all files together.
    """

    paths: tuple[pathlib.Path, ...]
    tensors: dict[str, StoredTensor]
    file_bytes: int
    _maps: dict[str, mmap.mmap] = dataclasses.field(repr=False)

    @classmethod
    def open(
        cls, folder: str | os.PathLike[str], more: Iterable[str] = ()
    ) -> SafetensorsCheckpoint:
        """Opens the model in `folder`, checking every header and tensor type.

        Types are `FLOATS`, and `more` where a quantised format has others.

        The index is the authority where there is one: its files are read and no others, and each
        tensor must be where it says. Raises `StokerError` for damaged or unsupported files.
        """
        folder = pathlib.Path(folder)
        placed, dtypes = _weight_map(folder), (*FLOATS, *more)
        names = sorted(set(placed.values())) if placed is not None else [FILE]
        tensors: dict[str, StoredTensor] = {}
        maps: dict[str, mmap.mmap] = {}
        total = 0
        for path in (folder / name for name in names):
            data, found = _open_file(path, dtypes)
            total += len(data)
            for tensor in found:
                if placed is not None and placed.get(tensor.name) != path.name:
                    raise StokerError(
                        f"'{path}' holds tensor '{tensor.name}', which '{INDEX}' does not place "
                        "there; download the model again"
                    )
                tensors[tensor.name], maps[tensor.name] = tensor, data
        for name, file in (placed or {}).items():
            if name not in tensors:
                raise StokerError(
                    f"'{folder / file}' lacks tensor '{name}', which '{INDEX}' places there; "
                    "download the model again"
                )
        return cls(tuple(folder / name for name in names), tensors, total, maps)

    def load(self, name: str, *index: slice) -> np.ndarray:
        """A copy of a tensor, or of what slices of its axes are, in the file's own type.

        Pages of the file are given back as they are copied: no large tensor is in memory twice, and
        of one whose rows are longer than what is wanted of them, no more than that.
        """
        info = self.tensors[name]
        flat = np.frombuffer(self._maps[name], np.uint8, info.nbytes, info.offset)
        stored = flat.view(TYPES[info.dtype]).reshape(info.shape)[index]
        copy = aligned_empty(stored.shape, stored.dtype)
        self._copy(name, copy, stored)
        return copy

    def _copy(self, name: str, target: np.ndarray, stored: np.ndarray) -> None:
        """Copies so much at a time that it touches few pages of the file."""
        step = _COPY_BYTES // stored.strides[0] if stored.ndim else 1
        if stored.ndim == 0 or len(stored) <= step:
            target[...] = stored
        elif step == 0:
            for one, other in zip(target, stored, strict=True):
                self._copy(name, one, other)
        else:
            for start in range(0, len(stored), step):
                target[start : start + step] = stored[start : start + step]
                self.release(name)

    def release(self, name: str) -> None:
        """Lets the system drop a file's pages from memory; reading them again still works."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._maps[name].madvise(mmap.MADV_DONTNEED)


def is_safetensors_folder(path: pathlib.Path) -> bool:
    """Whether `path` is a folder with a safetensors model in it."""
    return path.is_dir() and ((path / FILE).is_file() or (path / INDEX).is_file())


def _weight_map(folder: pathlib.Path) -> dict[str, str] | None:
    """The file of each tensor by the index, or None without one."""
    index = folder / INDEX
    if not index.is_file():
        return None
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise StokerError(f"'{index}' has no weight_map; download it again")
    for name, file in placed.items():
        if not isinstance(file, str) or pathlib.PurePath(file).name != file:
            raise StokerError(
                f"'{index}' places tensor '{name:.60}' in {file!r:.60}, which is not a file next "
                "to it; download it again"
            )
    return placed


def _open_file(path: pathlib.Path, dtypes: tuple[str, ...]) -> tuple[mmap.mmap, list[StoredTensor]]:
    """One file mapped, and its tensors."""
    try:
        # Only checks here: it would read tensors through a map that keeps their pages.
        with safetensors.safe_open(path, framework="np"):
            pass
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except safetensors.SafetensorError as error:
        raise StokerError(
            f"'{path}' is not a whole safetensors file ({' '.join(str(error).split()):.120}); "
            "download it again"
        ) from None
    except OSError as error:
        reason = error.strerror or "no such file"
        raise StokerError(f"'{path}' cannot be read ({reason}); download it too") from None
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length], object_pairs_hook=_unique(path))
    tensors = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        if entry["dtype"] not in dtypes:
            raise StokerError(
                f"tensor '{name}' has type {entry['dtype']}, which is not supported here; give a "
                f"model of {', '.join(dtypes)}"
            )
        shape = tuple(entry["shape"])
        tensors.append(StoredTensor(name, entry["dtype"], shape, 8 + length + begin, end - begin))
    return data, tensors


def _unique(path: pathlib.Path) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in items:
            if key in found:
                raise StokerError(f"'{path}' has '{key:.60}' twice; download it again")
            found[key] = value
        return found

    return pairs
