"""`stoker.json`: what a checkpoint in Stoker's own format holds, beside the arrays themselves."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from ..config import ModelConfig
from ..errors import StokerError
from ..json_files import read_json
from ..parameters import abstract_params, named_parameters
from ..quantized import QuantArray
from .config_json import config_from_json, config_to_json

FILE = "stoker.json"
VERSION = 1
STORAGES = ("safetensors", "orbax")
#: Folder with the tokenizer: files as Hugging Face has them, or `VOCABULARY`.
TOKENIZER, VOCABULARY = "tokenizer", "vocabulary.gguf"
#: Types of arrays, by the names that NumPy has for them.
DTYPES: Mapping[str, np.dtype] = {
    str(np.dtype(kind)): np.dtype(kind)
    for kind in (
        *(np.float32, np.float16, ml_dtypes.bfloat16, np.int8, np.uint8),
        *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu),
    )
}
#: Slices of the axes of an array; the last ones may be left out.
Index = tuple[slice, ...]
_KEYS = {"format", "version", "storage", "source", "config", "parameters"}
_STATICS = {
    field.name: field.type
    for field in dataclasses.fields(QuantArray)
    if not field.metadata.get("pytree_node", True)
}
_LEAVES = [field.name for field in dataclasses.fields(QuantArray) if field.name not in _STATICS]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a checkpoint: its type, as NumPy names it, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in memory."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class Stored:
    """One parameter of a checkpoint.

    Attributes:
      path: its dotted path.
      leaves: its arrays by name; a dense parameter has one, whose name is empty.
      statics: the other fields of its `QuantArray`.
    """

    path: str
    leaves: Mapping[str, Leaf]
    statics: Mapping[str, Any]

    @classmethod
    def of(cls, path: str, value: Any) -> Stored:
        """What there is to say of a value, dense or a `QuantArray`, of arrays or their shapes."""
        if not isinstance(value, QuantArray):
            return cls(path, {"": Leaf(str(value.dtype), tuple(value.shape))}, {})
        leaves = {name: getattr(value, name) for name in _LEAVES}
        present = {
            name: Leaf(str(leaf.dtype), tuple(leaf.shape))
            for name, leaf in leaves.items()
            if leaf is not None
        }
        return cls(path, present, {name: getattr(value, name) for name in _STATICS})

    @property
    def quantised(self) -> bool:
        """Whether its value is a `QuantArray`."""
        return "" not in self.leaves

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        if not self.quantised:
            return self.leaves[""].shape
        *rows, columns = self.leaves["codes"].shape
        return (*rows, columns * 8 // self.statics["bits"])

    @property
    def unit(self) -> int:
        """Columns that can only be read together: groups, and runs of them that share a factor."""
        counts = (leaf.shape[-1] for name, leaf in self.leaves.items() if name not in ("", "codes"))
        return math.lcm(*(self.shape[-1] // count for count in counts))

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(leaf.nbytes for leaf in self.leaves.values())

    def arrays(self) -> dict[str, Leaf]:
        """Its arrays by their full names, for example `layers.3.q.codes`."""
        return {
            f"{self.path}.{name}" if name else self.path: leaf for name, leaf in self.leaves.items()
        }

    def leaf_index(self, leaf: Leaf, index: Index) -> Index:
        """The slices of one of its arrays that slices of its own axes are."""
        if len(index) < len(self.shape):
            return index
        # Of columns, most arrays have fewer.
        first, last, _ = index[-1].indices(self.shape[-1])
        own = (at * leaf.shape[-1] // self.shape[-1] for at in (first, last))
        return (*index[:-1], slice(*own))

    def assemble(self, arrays: Mapping[str, Any]) -> Any:
        """The parameter, of its arrays by their full names."""
        if not self.quantised:
            return arrays[self.path]
        leaves = {name: arrays[f"{self.path}.{name}"] for name in self.leaves}
        return QuantArray(**leaves, **self.statics)

    def to_json(self) -> dict[str, Any]:
        """As `stoker.json` has it."""
        leaves = {
            name: {"dtype": leaf.dtype, "shape": list(leaf.shape)}
            for name, leaf in self.leaves.items()
        }
        return {"leaves": leaves, **self.statics} if self.quantised else leaves[""]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of a `stoker.json`.

    Attributes:
      config: the architecture.
      parameters: all of them by dotted path, in the order of `abstract_params`.
      storage: who keeps the arrays, one of `STORAGES`.
      source: what the checkpoint was made from, for people.
    """

    config: ModelConfig
    parameters: Mapping[str, Stored]
    storage: str
    source: str

    @property
    def leaves(self) -> dict[str, Leaf]:
        """All arrays by their full names."""
        found: dict[str, Leaf] = {}
        for stored in self.parameters.values():
            found |= stored.arrays()
        return found

    def write(self, folder: pathlib.Path) -> None:
        """Writes `stoker.json`."""
        ordered = (path for path, _ in named_parameters(abstract_params(self.config)))
        values = {
            "format": "stoker",
            "version": VERSION,
            "storage": self.storage,
            "source": self.source,
            "config": config_to_json(self.config),
            "parameters": {path: self.parameters[path].to_json() for path in ordered},
        }
        (folder / FILE).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")

    def check(self, config: ModelConfig) -> None:
        """Raises `StokerError` unless these are exactly the parameters of `config`, by shape.

        Norms and biases must be float32. The message names the path.
        """
        abstract = dict(named_parameters(abstract_params(config)))
        compare_names(self.parameters, abstract, "parameter")
        for path, parameter in abstract.items():
            stored = self.parameters[path]
            compare_shapes(path, stored.shape, parameter.shape)
            dtype = "quantised" if stored.quantised else stored.leaves[""].dtype
            if parameter.dtype not in ("any", dtype):
                raise StokerError(
                    f"'{path}' of the checkpoint is {dtype}, but must be {parameter.dtype}; "
                    "convert the model again"
                )


def compare_names(found: Mapping[str, Any], wanted: Mapping[str, Any], what: str) -> None:
    """Raises `StokerError` for the first name of `wanted` not in `found`, or the other way."""
    for name in wanted:
        if name not in found:
            raise StokerError(f"the checkpoint lacks the {what} '{name}'; convert the model again")
    for name in found:
        if name not in wanted:
            raise StokerError(
                f"the checkpoint has the {what} '{name:.80}', which its configuration has no place "
                "for; convert the model again"
            )


def compare_shapes(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Raises `StokerError` where shapes differ, saying so if they are each other's transpose."""
    if found != wanted:
        how = ", its transpose" if found == wanted[::-1] else ""
        raise StokerError(
            f"'{name}' of the checkpoint has the shape {list(found)}{how}, but the configuration "
            f"needs {list(wanted)}; convert the model again"
        )


def compare_leaves(found: Mapping[str, Leaf], wanted: Mapping[str, Leaf]) -> None:
    """Raises `StokerError` unless there are exactly the arrays wanted, in their shapes and types.

    The one at fault is named: missing, extra, of another shape (or transposed), of another type.
    """
    compare_names(found, wanted, "array")
    for name, leaf in wanted.items():
        compare_shapes(name, found[name].shape, leaf.shape)
        if found[name].dtype != leaf.dtype:
            raise StokerError(
                f"'{name}' of the checkpoint is {found[name].dtype}, but the configuration needs "
                f"{leaf.dtype}; convert the model again"
            )


def is_native_folder(path: pathlib.Path) -> bool:
    """Whether `path` is a folder with a checkpoint in Stoker's own format."""
    return (path / FILE).is_file()


def read_manifest(folder: pathlib.Path) -> Manifest:
    """Reads and checks `stoker.json`.

    Raises:
      StokerError: it is damaged, of another version, or does not describe a whole model.
    """
    values = read_json(folder / FILE)
    try:
        if values.get("format") != "stoker" or type(values.get("version")) is not int:
            raise StokerError(
                "it does not say that its format is 'stoker'; convert the model again"
            )
        if values["version"] != VERSION:
            raise StokerError(
                f"its version is {values['version']}, but this Stoker reads version {VERSION}; "
                "update Stoker, or convert the model again"
            )
        for key in sorted(_KEYS - values.keys()):
            raise StokerError(f"it lacks '{key}'; convert the model again")
        for key in sorted(values.keys() - _KEYS):
            raise StokerError(
                f"this version of Stoker does not know its '{key:.60}'; update Stoker"
            )
        if values["storage"] not in STORAGES:
            raise StokerError(
                f"its storage '{values['storage']!s:.40}' is not known; update Stoker"
            )
        config = config_from_json(values["config"])
        entries = values["parameters"]
        if not isinstance(entries, dict):
            raise StokerError("its parameters are no object; convert the model again")
        if config.n_layers > len(entries):  # Before a tree of so many layers is made.
            raise StokerError(
                f"config.n_layers is {config.n_layers}, but it has only {len(entries)} parameters; "
                "convert the model again"
            )
        parameters = {path: _stored(path, entry) for path, entry in entries.items()}
        manifest = Manifest(config, parameters, values["storage"], str(values["source"]))
        manifest.check(config)
    except StokerError as error:
        raise StokerError(f"'{folder / FILE}': {error}") from None
    return manifest


def _stored(path: str, entry: Any) -> Stored:
    if not isinstance(entry, dict):
        raise StokerError(f"'{path:.80}' is no object; convert the model again")
    if "leaves" not in entry:
        return Stored(path, {"": _leaf(path, entry)}, {})
    leaves = entry["leaves"]
    named = isinstance(leaves, dict) and {"codes", "scale"} <= leaves.keys() <= {*_LEAVES}
    statics = {key: value for key, value in entry.items() if key != "leaves"}
    if not named or not statics.keys() <= _STATICS.keys():
        raise StokerError(
            f"'{path:.80}' has leaves or fields that this version of Stoker does not know; update "
            "Stoker"
        )
    statics = {key: tuple(v) if isinstance(v, list) else v for key, v in statics.items()}
    stored = Stored(path, {name: _leaf(path, leaf) for name, leaf in leaves.items()}, statics)
    if not _fits(stored):
        raise StokerError(
            f"'{path:.80}' has codes, scales and a group that do not fit each other; convert the "
            "model again"
        )
    return stored


def _leaf(path: str, entry: Any) -> Leaf:
    given: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype, shape = given.get("dtype"), given.get("shape")
    sizes = isinstance(shape, list) and all(type(size) is int and size > 0 for size in shape)
    if (
        not isinstance(dtype, str)
        or dtype not in DTYPES
        or not sizes
        or given.keys() != {"dtype", "shape"}
    ):
        raise StokerError(
            f"'{path:.80}' has an array {entry!r:.80}, where a dtype and a shape are wanted; "
            "convert the model again"
        )
    return Leaf(dtype, tuple(shape or ()))


def _fits(stored: Stored) -> bool:
    """Whether the leaves of a quantised parameter belong together."""
    bits, group = stored.statics.get("bits"), stored.statics.get("group")
    if bits not in (4, 8) or type(group) is not int or group < 1:
        return False
    if type(stored.statics.get("zero_point", 0)) is not int:
        return False
    shapes = {name: leaf.shape for name, leaf in stored.leaves.items()}
    rows, columns = stored.shape[:-1], stored.shape[-1]
    grouped = (*rows, columns // group)
    if len(stored.shape) < 2 or columns % group or shapes["scale"] != grouped:
        return False
    if shapes.get("minimum", grouped) != grouped:
        return False
    factors = [shape for name, shape in shapes.items() if name.startswith("super_")]
    return all(shape[:-1] == rows and grouped[-1] % shape[-1] == 0 for shape in factors)
