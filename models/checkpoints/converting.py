"""Writes a model in Stoker's own format, one parameter at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator

import numpy as np

from ..errors import StokerError
from ..loading import Opened, check_tensors, check_vocabulary, naming_of, open_checkpoint
from ..parameters import abstract_params, named_parameters
from ..placing.placement import Reader
from ..quantise import Quantisation, is_matrix
from ..sources import resolve
from ..tokenizers.copying import copy_tokenizer_files, write_vocabulary
from . import manifest, orbax
from .gguf import GGUFCheckpoint
from .manifest import Manifest, Stored, is_native_folder
from .native import SPELLINGS
from .reading import Progress, read_parameters, reported
from .safetensors_writer import SHARD_BYTES, SafetensorsWriter

#: Types that dense matrices may be written in.
DENSE = ("float32", "bfloat16", "float16")
#: Room in a safetensors header for what stands beside the name of an array.
_ENTRY_BYTES = 140
_MOST_LEAVES = 5
#: What a conversion puts into its folder.
_OWN = re.compile(
    rf"{re.escape(manifest.FILE)}|{manifest.TOKENIZER}|{orbax.FOLDER}"
    r"|model[-\w]*\.safetensors(\.index\.json)?"
)


@dataclasses.dataclass(frozen=True)
class Converted:
    """What a conversion wrote.

    Attributes:
      path: the folder.
      read_bytes: of the checkpoint that was read.
      written_bytes: of all arrays.
    """

    path: pathlib.Path
    read_bytes: int
    written_bytes: int


def convert_model(
    name: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    to: str = "safetensors",
    quantize: str | Quantisation | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> Converted:
    """Reads a model as `load_model` does and writes it as a folder that loads fast.

    The folder appears whole or not at all. Its arrays are those that `load_model` keeps in memory:
    `stoker.json` describes them, and the tokenizer's files lie in `tokenizer`.

    Args:
      name: what `resolve` takes.
      output: the folder to write.
      to: "safetensors" or "orbax".
      quantize: as in `load_model`.
      dtype: all matrices become dense and of this type, one of `DENSE`, before they are quantised;
        None: they stay as they are.
      overwrite: replace a folder that a conversion wrote before; no other is ever removed.
      shard_bytes: about how much goes into one safetensors file.
      progress: told how many bytes of the model have been read.

    Raises:
      StokerError: the model cannot be read, the folder cannot be written or is not empty, or the
        disk is full.
    """
    how = Quantisation.parse(quantize) if isinstance(quantize, str) else quantize
    if to not in manifest.STORAGES:
        raise StokerError(f"format '{to}' is not known; use {' or '.join(manifest.STORAGES)}")
    if dtype is not None and dtype not in DENSE:
        raise StokerError(f"type '{dtype}' is not known for weights; use {', '.join(DENSE)}")
    if to == "orbax":
        orbax.require()
    target = pathlib.Path(output).expanduser().absolute()
    _check_target(target, overwrite)
    opened = open_checkpoint(resolve(name))
    check_tensors(opened.checkpoint, opened.family, opened.config)
    # A tokenizer that cannot be read later is better refused now.
    check_vocabulary(name, opened.tokenizer(), opened.config)
    with _fresh_folder(target, _estimate(opened, how, dtype), overwrite) as folder:
        readers = read_parameters(
            opened.checkpoint,
            naming_of(opened.checkpoint, opened.family),
            opened.config,
            quantise=how,
            dense=dtype,
        )
        sizes = [read.nbytes for read in readers.values()]
        parameters = reported(readers.items(), sizes, progress)
        stored = _write(folder, parameters, opened, to, shard_bytes)
        steps = [str(name), *([dtype] if dtype else []), *([str(how)] if how else [])]
        Manifest(opened.config, stored, to, ", ".join(steps)).write(folder)
        _keep_tokenizer(opened, folder / manifest.TOKENIZER)
    written = sum(one.nbytes for one in stored.values())
    return Converted(target, opened.checkpoint.file_bytes, written)


def _write(
    folder: pathlib.Path,
    parameters: Iterator[tuple[str, Reader]],
    opened: Opened,
    to: str,
    shard_bytes: int,
) -> dict[str, Stored]:
    """Writes all parameters; says what they were."""
    stored: dict[str, Stored] = {}
    if to == "orbax":
        # Orbax takes the whole tree at once.
        values = {path: read() for path, read in parameters}
        orbax.write_tree(folder, values)
        return {path: Stored.of(path, value) for path, value in values.items()}
    paths = [path for path, _ in named_parameters(abstract_params(opened.config))]
    room = 64 + sum(_MOST_LEAVES * (len(path) + _ENTRY_BYTES) for path in paths)
    writer = SafetensorsWriter(folder, room, shard_bytes)
    try:
        for path, read in parameters:
            value = read()
            stored[path] = Stored.of(path, value)
            for (name, leaf), field in zip(
                stored[path].arrays().items(), stored[path].leaves, strict=True
            ):
                array = np.asarray(getattr(value, field) if field else value)
                writer.add(name, SPELLINGS[leaf.dtype], array)
            # What is written must not stay while the next one is read.
            del value, array
        writer.close()
    finally:
        writer.abandon()
    return stored


def _keep_tokenizer(opened: Opened, folder: pathlib.Path) -> None:
    folder.mkdir()
    if isinstance(opened.checkpoint, GGUFCheckpoint):
        write_vocabulary(opened.checkpoint.metadata, folder / manifest.VOCABULARY)
    elif is_native_folder(opened.path):
        shutil.copytree(opened.path / manifest.TOKENIZER, folder, dirs_exist_ok=True)
    else:
        copy_tokenizer_files(opened.path, folder)


def _estimate(opened: Opened, how: Quantisation | None, dtype: str | None) -> int:
    """Bytes that the arrays will take, about."""
    naming = naming_of(opened.checkpoint, opened.family)
    uses = naming.uses(opened.config)
    total = 0
    for path, parameter in named_parameters(abstract_params(opened.config)):
        tensors = [opened.checkpoint.tensors[name] for name in uses[path].tensors]
        share = parameter.size / (len(tensors) * np.prod(uses[path].shape, dtype=np.float64))
        kept = int(sum(tensor.nbytes for tensor in tensors) * share)
        if is_matrix(path, parameter) and dtype is not None:
            kept = parameter.size * (4 if dtype == "float32" else 2)
        if is_matrix(path, parameter) and how is not None and how.group_of(parameter.shape[-1]):
            kept = min(kept, how.nbytes(parameter.shape))
        total += kept
    return total


@contextlib.contextmanager
def _fresh_folder(target: pathlib.Path, needed: int, overwrite: bool) -> Iterator[pathlib.Path]:
    """A folder beside `target` that takes its place at the end, or leaves nothing behind."""
    scratch: str | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(target.parent).free < needed * 1.02 + (1 << 20):
            raise OSError(errno.ENOSPC, "")
        scratch = tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent)
        folder = pathlib.Path(scratch) / target.name
        folder.mkdir()
        yield folder
        _swap(folder, target, pathlib.Path(scratch) / f"{target.name}.old")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StokerError(
                f"the disk of '{target.parent}' is full: the model needs {needed / 1e9:.2f} GB "
                "there; free some space"
            ) from None
        raise StokerError(
            f"'{target}' cannot be written ({error.strerror or error}); give another folder"
        ) from None
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def _swap(folder: pathlib.Path, target: pathlib.Path, old: pathlib.Path) -> None:
    """Gives `folder` the name of `target`; what had it, if anything did, becomes `old`."""
    replaces = target.exists()
    if replaces:
        os.rename(target, old)
    try:
        os.rename(folder, target)
    except BaseException:
        if replaces and not target.exists():
            os.rename(old, target)
        raise


def _check_target(target: pathlib.Path, overwrite: bool) -> None:
    """Raises `StokerError` where something is in the way that must not be replaced."""
    try:
        if not target.exists() or (target.is_dir() and not any(target.iterdir())):
            return
        names = [path.name for path in target.iterdir()] if is_native_folder(target) else []
    except OSError as error:
        raise StokerError(
            f"'{target}' cannot be looked at ({error.strerror or error}); give another folder"
        ) from None
    others = [name for name in sorted(names) if not _OWN.fullmatch(name)]
    if others or not names:
        held = f" (it holds '{others[0]:.60}')" if others else ""
        raise StokerError(
            f"'{target}' is there already, and not what a conversion wrote{held}, so it is left "
            "alone; give another folder"
        )
    if not overwrite:
        raise StokerError(f"'{target}' is there already; give another folder, or --overwrite")
