"""A GGUF checkpoint: one file, or all shards of a split one, mapped into memory."""

from __future__ import annotations

import dataclasses
import mmap
import os
import pathlib
import re
from typing import Any

import numpy as np
from gguf.constants import Keys

from ..errors import StokerError
from ..quantized import QuantArray
from .gguf_blocks import blocks_of, check_types, convert
from .gguf_header import GGUFHeader, TensorInfo, open_mapped, read_header
from .safetensors import INDEX

__all__ = ["GGUFCheckpoint", "read_header", "shard_paths"]

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def shard_paths(path: str | os.PathLike[str]) -> tuple[pathlib.Path, ...]:
    """All files of the model at `path`, in order: a GGUF file, any shard, or a folder of one model.

    Raises `StokerError` where there is none, where a folder holds several models, and where a
    shard is missing.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        path = _only_model(path)
    match = _SHARD.fullmatch(path.name)
    if match is None or int(match["count"]) == 1:
        if not path.is_file():
            raise StokerError(f"'{path}' does not exist or is not a file; give a GGUF file")
        return (path,)
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count:
        raise StokerError(f"'{path}' names a shard outside 1 to {count}; restore its name")
    shards = []
    for number in range(1, count + 1):
        shard = path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf")
        if not shard.is_file():
            raise StokerError(
                f"shard {number} of {count} is missing: '{shard}'; download it too, next to the "
                "others"
            )
        shards.append(shard)
    return tuple(shards)


def _only_model(folder: pathlib.Path) -> pathlib.Path:
    """The file, or one shard, of the only GGUF model in `folder`."""
    try:
        files = sorted(file for file in folder.iterdir() if file.name.lower().endswith(".gguf"))
    except OSError as error:
        raise StokerError(
            f"'{folder}' cannot be listed ({error.strerror}); give a readable folder"
        ) from None
    models: dict[str, pathlib.Path] = {}
    for file in files:
        match = _SHARD.fullmatch(file.name)
        models.setdefault(f"{match['stem']}-of-{match['count']}" if match else file.name, file)
    if not models:
        raise StokerError(
            f"'{folder}' holds no .gguf file and no model.safetensors{_instead(folder)}; give a "
            "GGUF file, or a folder with one of the two"
        )
    if len(models) > 1:
        names = ", ".join(file.name for file in list(models.values())[:4])
        raise StokerError(f"'{folder}' holds {len(models)} models ({names}); name one of them")
    return next(iter(models.values()))


def _instead(folder: pathlib.Path) -> str:
    """What else a folder holds that is taken for a model."""
    for pattern, what in (
        ("*.safetensors", f"nor the {INDEX} that '{{}}' needs"),
        ("*.bin", "but '{}', and pickled weights are not read"),
        ("*.pt*", "but '{}', and pickled weights are not read"),
    ):
        for file in sorted(folder.glob(pattern)):
            return f", {what.format(file.name)}"
    return ""


@dataclasses.dataclass(frozen=True)
class GGUFCheckpoint:
    """The tensors and metadata of one model; nothing is read before `read`.

    Attributes:
      paths: its files, in shard order.
      metadata: of the first shard, plain Python values.
      tensors: of all shards, by name.
      file_bytes: of all files together.
    """

    paths: tuple[pathlib.Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    file_bytes: int
    _maps: dict[str, mmap.mmap] = dataclasses.field(repr=False)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GGUFCheckpoint:
        """Opens the model at `path` (see `shard_paths`), checking every header and tensor type.

        Raises `StokerError` for damaged, mismatched or unsupported files.
        """
        paths = shard_paths(path)
        headers = [read_header(shard) for shard in paths]
        _check_split(headers)
        tensors: dict[str, TensorInfo] = {}
        maps: dict[str, mmap.mmap] = {}
        for header in headers:
            with open_mapped(header.path) as (data, size):
                if size != header.file_bytes:
                    raise StokerError(f"'{header.path}' changed while it was opened; try again")
                for name, info in header.tensors.items():
                    if name in tensors:
                        raise StokerError(
                            f"'{header.path}': tensor '{name}' is in another shard too; download "
                            "the shards again"
                        )
                    tensors[name], maps[name] = info, data
        check_types(tensors.values())
        file_bytes = sum(header.file_bytes for header in headers)
        return cls(paths, headers[0].metadata, tensors, file_bytes, maps)

    def read(self, name: str) -> np.ndarray:
        """The bytes of a tensor: a read-only uint8 view of the mapped file."""
        info = self.tensors[name]
        return np.frombuffer(self._maps[name], np.uint8, info.nbytes, info.offset)

    def load(self, name: str, *index: slice) -> np.ndarray | QuantArray:
        """A tensor, or what slices of its axes are, as `gguf_blocks.convert` makes it."""
        info = self.tensors[name]
        blocks = blocks_of(self.read(name), info)
        if len(index) == len(info.shape):
            first, last, _ = index[-1].indices(info.shape[-1])
            index = (*index[:-1], slice(first // info.unit, -(-last // info.unit)))
        return convert(blocks[index], info.type)

    def release(self, name: str) -> None:
        """Lets the system drop a tensor's pages from memory; reading it again still works."""
        if hasattr(mmap, "MADV_DONTNEED"):
            # The whole file's: reading a neighbour maps up to 2 MB around it, and so brings back
            # pages of tensors that were released before.
            self._maps[name].madvise(mmap.MADV_DONTNEED)


def _check_split(headers: list[GGUFHeader]) -> None:
    """Raises `StokerError` unless the headers are those of one whole model, in order."""
    count = len(headers)
    for number, header in enumerate(headers):
        claimed = header.metadata.get(Keys.Split.LLM_KV_SPLIT_COUNT, 1)
        position = header.metadata.get(Keys.Split.LLM_KV_SPLIT_NO, 0)
        if claimed in (0, 1) and count == 1:
            continue
        if claimed != count or position != number:
            raise StokerError(
                f"'{header.path}' says that it is shard {_ordinal(position)} of {claimed} but its "
                f"name says {number + 1} of {count}; keep shards apart, under their own names"
            )
    stated = headers[0].metadata.get(Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT)
    found = sum(len(header.tensors) for header in headers)
    if count > 1 and stated is not None and stated != found:
        raise StokerError(
            f"'{headers[0].path}' announces {stated} tensors but its {count} shards hold {found}; "
            "download the shards again"
        )


def _ordinal(position: Any) -> Any:
    return position + 1 if isinstance(position, int) else position
