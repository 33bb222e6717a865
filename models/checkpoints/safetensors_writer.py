"""Writes safetensors files one array at a time, without knowing beforehand how many there are."""

from __future__ import annotations

import json
import os
import pathlib
import struct
from typing import IO

import numpy as np

from .safetensors import FILE, INDEX

#: Bytes of arrays in a file, about, before the next is begun.
SHARD_BYTES = 5_000_000_000


class SafetensorsWriter:
    """Files `model.safetensors`, or shards and their index, in a folder.

    The header, which comes first in a file, is known last: space for it is kept and filled up with
    blanks, which the format allows.

    Args:
      folder: exists.
      header_bytes: room for the header of each file.
      shard_bytes: arrays beyond this go into the next file.
    """

    def __init__(
        self, folder: pathlib.Path, header_bytes: int, shard_bytes: int = SHARD_BYTES
    ) -> None:
        self._folder, self._shard_bytes = folder, shard_bytes
        # Whole units of 64 bytes with the length before it: arrays may then be aligned in memory.
        self._header_bytes = -(-(header_bytes + 8) // 64) * 64 - 8
        self._headers: list[dict[str, object]] = []
        self._file: IO[bytes] | None = None
        self._written = self.total_bytes = 0

    def add(self, name: str, spelling: str, array: np.ndarray) -> None:
        """Writes an array under a name, with its type as safetensors spells it."""
        full = self._written and self._written + array.nbytes > self._shard_bytes
        if self._file is None or full:
            self._finish()
            self._headers.append({})
            self._file = open(self._path(len(self._headers)), "wb")  # noqa: SIM115
            self._file.seek(8 + self._header_bytes)
            self._written = 0
        ends = [self._written, self._written + array.nbytes]
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._file.write(raw.data)
        self._headers[-1][name] = {
            "dtype": spelling,
            "shape": list(array.shape),
            "data_offsets": ends,
        }
        self._written = ends[1]
        self.total_bytes += array.nbytes

    def close(self) -> None:
        """Ends the last file, gives all their names, and writes the index if there are several."""
        self._finish()
        count = len(self._headers)
        placed: dict[str, str] = {}
        for number, header in enumerate(self._headers, 1):
            name = FILE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            os.rename(self._path(number), self._folder / name)
            placed |= dict.fromkeys(header, name)
        if count > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": placed}
            (self._folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")

    def abandon(self) -> None:
        """Closes what is open; the files are no use."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _path(self, number: int) -> pathlib.Path:
        return self._folder / f"part-{number}"

    def _finish(self) -> None:
        if self._file is None:
            return
        header = json.dumps(self._headers[-1], separators=(",", ":")).encode()
        assert len(header) <= self._header_bytes, "room for the header was reckoned too small"
        self._file.seek(0)
        self._file.write(struct.pack("<Q", self._header_bytes) + header.ljust(self._header_bytes))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
