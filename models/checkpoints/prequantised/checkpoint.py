"""Safetensors whose quantised matrices go by the names and shapes of the plain ones."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ...errors import StokerError
from ...quantized import QuantArray
from ..safetensors import SafetensorsCheckpoint, StoredTensor

#: Stored tensors by what they are for, for example "scale".
Parts = Mapping[str, Any]
#: Makes a matrix of so many columns.
Make = Callable[[Parts, int], QuantArray]


@dataclasses.dataclass(frozen=True)
class Along:
    """Where an axis of a matrix lies in a stored tensor.

    Attributes:
      axis: of the stored tensor.
      elements: how many of the matrix's axis there are to `entries` of that one.
      entries: see `elements`.
    """

    axis: int
    elements: int = 1
    entries: int = 1


@dataclasses.dataclass(frozen=True)
class Source:
    """A stored tensor that a matrix is made of.

    Attributes:
      name: of the stored tensor.
      axes: where each axis of the matrix is in it; None: any element needs all of it.
    """

    name: str
    axes: tuple[Along | None, ...]

    def index(self, spans: Sequence[tuple[int, int]], ndim: int) -> list[slice]:
        """The slices of the stored tensor, of `ndim` axes, that a part of the matrix needs."""
        found = [slice(None)] * ndim
        for along, (start, end) in zip(self.axes, spans, strict=True):
            if along is not None:
                first = start * along.entries // along.elements
                found[along.axis] = slice(first, -(-end * along.entries // along.elements))
        return found


@dataclasses.dataclass(frozen=True)
class QuantisedTensor:
    """One matrix, and the stored tensors that it is made of.

    Attributes:
      name: of the plain tensor, for example `model.layers.0.mlp.up_proj.weight`.
      shape: of the plain tensor, `[..., R, C]`.
      sources: the stored tensors, by the names that `make` wants.
      nbytes: of the stored tensors together.
      make: a matrix, of NumPy leaves, from the stored tensors or what a part of it needs of them,
        and the number of its columns.
    """

    name: str
    shape: tuple[int, ...]
    sources: Mapping[str, Source]
    nbytes: int
    make: Make = dataclasses.field(repr=False)

    @property
    def quantised(self) -> bool:
        """Always."""
        return True

    @property
    def unit(self) -> int:
        """Columns that can only be read together."""
        return self.stored_together(-1)

    def stored_together(self, axis: int) -> int:
        """Elements of an axis that can only be read together."""
        places = [source.axes[axis] for source in self.sources.values()]
        return math.lcm(*(along.elements for along in places if along is not None))


@dataclasses.dataclass(frozen=True)
class QuantisedCheckpoint:
    """The tensors of one model by their plain names; nothing large is read before `load`.

    Attributes:
      files: the stored tensors.
      tensors: by plain name, those that are stored as they are and those that are quantised.
      method: how `quantization_config` calls the format.
    """

    files: SafetensorsCheckpoint
    tensors: dict[str, StoredTensor | QuantisedTensor]
    method: str

    @property
    def paths(self) -> tuple[pathlib.Path, ...]:
        """The model's files."""
        return self.files.paths

    @property
    def file_bytes(self) -> int:
        """Of all files together."""
        return self.files.file_bytes

    def load(self, name: str, *index: slice) -> np.ndarray | QuantArray:
        """A tensor, or what slices of its axes are: quantised with NumPy leaves, or as it is."""
        tensor = self.tensors[name]
        if isinstance(tensor, StoredTensor):
            return self.files.load(name, *index)
        spans, own = [], []
        for axis, size in enumerate(tensor.shape):
            wanted = range(size)[index[axis] if axis < len(index) else slice(None)]
            # What is stored together is read together.
            unit = tensor.stored_together(axis)
            start, end = wanted.start // unit * unit, min(-(-wanted.stop // unit) * unit, size)
            spans.append((start, end))
            own.append(slice(wanted.start - start, wanted.stop - start, wanted.step))
        made = tensor.make(
            {part: self._part(source, spans) for part, source in tensor.sources.items()},
            spans[-1][1] - spans[-1][0],
        )
        rows = tuple(own[:-1])
        if all(len(range(b - a)[it]) == b - a for it, (a, b) in zip(rows, spans, strict=False)):
            return made
        return jax.tree.map(lambda leaf: np.ascontiguousarray(leaf[rows]), made)

    def loaded_bytes(self, name: str) -> int:
        """What a quantised tensor takes in memory, reckoned from made-up rows; nothing is read.

        Symmetric formats whose zero points differ after all take more.
        """
        tensor = self.tensors[name]
        assert isinstance(tensor, QuantisedTensor)
        unit = tensor.stored_together(0)
        parts = {}
        for part, source in tensor.sources.items():
            stored = self.files.tensors[source.name]
            shape = list(stored.shape)
            if (along := source.axes[0]) is not None:
                shape[along.axis] = -(-unit * along.entries // along.elements)
            # Zero points that are all one, as those of most models are; factors that divide.
            fill = 0 if stored.numpy_type.kind in "iu" else 1
            parts[part] = np.full(shape, fill, stored.numpy_type)
        return int(tensor.make(parts, tensor.shape[-1]).nbytes) * tensor.shape[0] // unit

    def _part(self, source: Source, spans: Sequence[tuple[int, int]]) -> np.ndarray:
        """What a part of a matrix needs of a stored tensor."""
        ndim = len(self.files.tensors[source.name].shape)
        return self.files.load(source.name, *source.index(spans, ndim))

    def release(self, name: str) -> None:
        """Lets the system drop a file's pages from memory; reading them again still works."""
        tensor = self.tensors[name]
        if isinstance(tensor, StoredTensor):
            self.files.release(name)
            return
        for source in tensor.sources.values():
            self.files.release(source.name)


class Builder:
    """Takes stored tensors for quantised ones, checking each; what is left over is plain.

    Args:
      files: the stored tensors.
      method: how errors call the format, for example "gptq".
    """

    def __init__(self, files: SafetensorsCheckpoint, method: str) -> None:
        self.files, self.method = files, method
        self._made: dict[str, QuantisedTensor] = {}
        self._taken: set[str] = set()

    def modules(self, suffix: str) -> list[str]:
        """Names without `suffix` of the stored tensors that end with it."""
        return [name.removesuffix(suffix) for name in self.files.tensors if name.endswith(suffix)]

    def has(self, name: str) -> bool:
        """Whether the files have a tensor."""
        return name in self.files.tensors

    def stored(self, name: str, *dtypes: str) -> StoredTensor:
        """A tensor that must be there, with one of these types."""
        found = self.files.tensors.get(name)
        if found is None:
            raise StokerError(
                f"the file lacks tensor '{name}', which {self.method} needs beside the others of "
                "its module; download the model again"
            )
        if dtypes and found.dtype not in dtypes:
            raise StokerError(
                f"tensor '{name}' has type {found.dtype} where {self.method} needs "
                f"{' or '.join(dtypes)}; give a model that keeps to the format"
            )
        return found

    def check_shape(self, name: str, *shapes: tuple[int, ...]) -> None:
        """Raises `StokerError` unless a tensor has one of these shapes."""
        found = self.stored(name).shape
        if found not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise StokerError(
                f"tensor '{name}' has shape {list(found)} where {self.method} needs {wanted}; "
                "convert the model again"
            )

    def read(self, name: str) -> np.ndarray:
        """The values of a small tensor."""
        return self.files.load(name)

    def add(
        self,
        name: str,
        shape: tuple[int, ...],
        sources: Mapping[str, Source],
        make: Make,
    ) -> None:
        """Adds a quantised tensor, made of stored ones."""
        nbytes = sum(self.stored(source.name).nbytes for source in sources.values())
        self._made[name] = QuantisedTensor(name, shape, sources, nbytes, make)
        self._taken.update(source.name for source in sources.values())

    def drop(self, names: Iterable[str]) -> None:
        """Tensors that no weight needs, where they are there; the caller says why."""
        self._taken.update(names)

    def checkpoint(self, plain: Iterable[str]) -> QuantisedCheckpoint:
        """What was added, and all other tensors as they are, whose types must be in `plain`."""
        if not self._made:
            raise StokerError(
                f"config.json: quantization_config says {self.method}, but no tensor is quantised; "
                "remove the key if these are the plain weights"
            )
        rest = {name: it for name, it in self.files.tensors.items() if name not in self._taken}
        for name, tensor in rest.items():
            if tensor.dtype not in plain:
                raise StokerError(
                    f"tensor '{name}' has type {tensor.dtype}, and nothing in quantization_config "
                    f"({self.method}) says how to read it; give a model that keeps to the format"
                )
            if name in self._made:
                raise StokerError(f"the file has '{name}' both quantised and plain; keep one")
        return QuantisedCheckpoint(self.files, {**rest, **self._made}, self.method)
