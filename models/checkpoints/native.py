"""A checkpoint in Stoker's own format, whoever keeps its arrays: nothing is requantised."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from ..config import ModelConfig
from ..families.naming import Naming
from .manifest import DTYPES, Index, Leaf, Manifest, Stored, compare_leaves, read_manifest
from .orbax import OrbaxArrays
from .safetensors import TYPES, SafetensorsCheckpoint

#: Types as safetensors files spell them, by NumPy's names.
SPELLINGS: Mapping[str, str] = {
    str(dtype): spelling for spelling, dtype in TYPES.items() if str(dtype) in DTYPES
}


class Arrays(Protocol):
    """Who keeps the arrays of a checkpoint."""

    def leaves(self) -> Mapping[str, Leaf]:
        """What there is, by full name, from headers alone."""

    def load(self, stored: Stored, index: Index) -> Mapping[str, np.ndarray]:
        """The arrays of a parameter, or what slices of its axes are of each, by full names."""

    def release(self, stored: Stored) -> None:
        """Lets the system drop their pages."""

    @property
    def file_bytes(self) -> int:
        """Of all its files."""


@dataclasses.dataclass(frozen=True)
class NativeCheckpoint:
    """The parameters of a model by their dotted paths; nothing is read before `load`.

    Attributes:
      path: its folder.
      manifest: what `stoker.json` says.
      tensors: the parameters by path.
    """

    path: pathlib.Path
    manifest: Manifest
    tensors: Mapping[str, Stored]
    _arrays: Arrays = dataclasses.field(repr=False)

    @classmethod
    def open(cls, folder: pathlib.Path) -> NativeCheckpoint:
        """Opens the checkpoint in `folder`, comparing every array's name, shape and type first.

        Raises:
          StokerError: it is damaged; the array at fault is named.
        """
        manifest = read_manifest(folder)
        at = OrbaxArrays if manifest.storage == "orbax" else SafetensorsArrays
        arrays: Arrays = at(folder)
        compare_leaves(arrays.leaves(), manifest.leaves)
        return cls(folder, manifest, manifest.parameters, arrays)

    @property
    def config(self) -> ModelConfig:
        """The architecture."""
        return self.manifest.config

    @property
    def file_bytes(self) -> int:
        """Of all files of arrays together."""
        return self._arrays.file_bytes

    @property
    def naming(self) -> Naming:
        """Tensors are called what the parameters are."""
        number = re.compile(r"\.\d+\.")
        return Naming(
            {path.rpartition(".")[2]: number.sub(".{layer}.", path) for path in self.tensors}
        )

    def load(self, name: str, *index: slice) -> Any:
        """A parameter, or what slices of its axes are: a NumPy array, or a `QuantArray` of them."""
        stored = self.tensors[name]
        return stored.assemble(self._arrays.load(stored, index))

    def release(self, name: str) -> None:
        """Lets the system drop a parameter's pages from memory; reading it again still works."""
        self._arrays.release(self.tensors[name])


class SafetensorsArrays:
    """Arrays in safetensors files, mapped into memory."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._files = SafetensorsCheckpoint.open(folder, SPELLINGS.values())
        self._names = {spelling: name for name, spelling in SPELLINGS.items()}

    def leaves(self) -> Mapping[str, Leaf]:
        """As `Arrays.leaves`."""
        return {
            name: Leaf(self._names[tensor.dtype], tensor.shape)
            for name, tensor in self._files.tensors.items()
        }

    def load(self, stored: Stored, index: Index) -> Mapping[str, np.ndarray]:
        """As `Arrays.load`: copies."""
        return {
            name: self._files.load(name, *stored.leaf_index(leaf, index))
            for name, leaf in stored.arrays().items()
        }

    def release(self, stored: Stored) -> None:
        """As `Arrays.release`."""
        for name in stored.arrays():
            self._files.release(name)

    @property
    def file_bytes(self) -> int:
        """As `Arrays.file_bytes`."""
        return self._files.file_bytes
