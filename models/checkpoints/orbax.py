"""Parameters in Orbax checkpoints: saved from any mesh, restored on any other.

The arrays are a tree of nested dicts, a dotted path a level to each part: `layers`, `3`, `q`,
`codes`. What the tree must hold is in `stoker.json` beside it, and is compared with what Orbax
finds before anything is read. Shardings follow from the mesh of the reader; those that were saved
never matter. Needs the extra `orbax`.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from ...sharding import Rules
from ..config import ModelConfig
from ..errors import StokerError
from ..parameters import Parameter, Params, abstract_params, is_weight, named_parameters, unflatten
from ..placing.placement import Reader, cuts_of, place_parameter, split_config
from ..quantized import QuantArray
from .manifest import DTYPES, Index, Leaf, Manifest, Stored, compare_leaves, read_manifest

#: The folder of the tree, beside `stoker.json`.
FOLDER = "orbax"
#: Bytes of the pieces that arrays are written in: whoever wants some rows or columns of one reads
#: the pieces they lie in, and no others.
_PIECE_BYTES = 8 << 20


def save_params(
    path: pathlib.Path | str, params: Params, config: ModelConfig, *, source: str = "parameters"
) -> None:
    """Writes the parameters of a model, wherever their shards are, into the folder `path`.

    Args:
      path: a folder that is empty or does not exist.
      params: the tree of `abstract_params(config)`, of JAX or NumPy arrays and `QuantArray`s.
      config: the architecture.
      source: what `stoker.json` says about where they are from.

    Raises:
      StokerError: the parameters do not fit the configuration or are packed for the CPU kernels,
        or the folder is not empty.
    """
    folder = pathlib.Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StokerError(f"'{folder}' is not an empty folder; give a new one")
    values = dict(
        zip(
            (name for name, _ in named_parameters(abstract_params(config))),
            jax.tree.leaves(params, is_leaf=is_weight),
            strict=True,
        )
    )
    for name, value in values.items():
        if not isinstance(value, QuantArray) and is_weight(value):
            raise StokerError(
                f"'{name}' is packed for the CPU kernels; load the model with kernels='xla' to "
                "save it"
            )
    stored = {name: Stored.of(name, value) for name, value in values.items()}
    manifest = Manifest(config, stored, "orbax", source)
    manifest.check(config)
    folder.mkdir(parents=True, exist_ok=True)
    write_tree(folder, values)
    if jax.process_index() == 0:
        manifest.write(folder)


def require() -> None:
    """Raises `StokerError` where the library is not installed."""
    _orbax()


def write_tree(folder: pathlib.Path, values: Mapping[str, Any]) -> None:
    """Writes parameters by their dotted paths as the Orbax tree of `folder`."""
    arrays: dict[str, Any] = {}
    for path, value in values.items():
        stored = Stored.of(path, value)
        for name, leaf in zip(stored.arrays(), stored.leaves, strict=True):
            arrays[name] = getattr(value, leaf) if leaf else value
    ocp = _orbax()
    # Orbax makes a copy of every NumPy array before it writes any; of these it does not.
    host = jax.local_devices(backend="cpu")[0]
    arrays = {
        name: leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf, host)
        for name, leaf in arrays.items()
    }
    with _checkpointer() as checkpointer:
        pieces = dict.fromkeys(arrays, ocp.SaveArgs(chunk_byte_size=_PIECE_BYTES))
        how = ocp.args.PyTreeSave(_nested(arrays), save_args=_nested(pieces))
        checkpointer.save(_tree_folder(folder), args=how)


def restore_params(
    path: pathlib.Path | str,
    config: ModelConfig,
    *,
    mesh: jax.sharding.Mesh | None = None,
    rules: Rules | None = None,
) -> Params:
    """The parameters of an Orbax checkpoint, each device reading its own shards.

    Tree, shapes and types are compared with `abstract_params(config)` before anything is read.
    Where a parameter does not divide evenly, and its parts are padded or repeated, each is read as
    `place_parameter` does it.

    Args:
      path: a folder that `save_params` or `stoker convert` wrote.
      config: the architecture.
      mesh: where to put them, as `split_config(config, mesh, rules)` says; None: on one device.
      rules: in place of those of `sharding.RULES` for the logical axes they name.

    Raises:
      StokerError: an array is missing, extra, transposed or otherwise of another shape, or of
        another type; its dotted path is in the message.
    """
    folder = pathlib.Path(path)
    manifest = read_manifest(folder)
    if manifest.storage != "orbax":
        raise StokerError(f"'{folder}' keeps its arrays as {manifest.storage}; use load_model")
    manifest.check(config)
    compare_leaves(OrbaxArrays(folder).leaves(), manifest.leaves)
    if mesh is not None:
        config = split_config(config, mesh, rules)
    abstract = dict(named_parameters(abstract_params(config)))
    one_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shardings: dict[str, jax.sharding.Sharding] = {}
    for name, parameter in abstract.items():
        stored = manifest.parameters[name]
        if mesh is None:
            shardings |= dict.fromkeys(stored.arrays(), one_device)
        elif _divides(parameter, stored, config):
            spec = config.split.spec(parameter.axes)
            shardings |= dict.fromkeys(stored.arrays(), jax.sharding.NamedSharding(mesh, spec))
    ocp = _orbax()
    arrays = _restore(
        folder,
        {name: leaf for name, leaf in manifest.leaves.items() if name in shardings},
        lambda name, leaf: ocp.ArrayRestoreArgs(sharding=shardings[name], global_shape=leaf.shape),
    )
    parts, values = OrbaxArrays(folder), {}
    for name, parameter in abstract.items():
        stored = manifest.parameters[name]
        if stored.arrays().keys() <= shardings.keys():
            values[name] = stored.assemble(arrays)
            continue
        assert mesh is not None

        def part(index: Index, stored: Stored = stored) -> Any:
            return stored.assemble(parts.load(stored, index))

        values[name] = place_parameter(parameter, config, mesh, Reader(stored.unit, part))
    return unflatten(abstract_params(config), values)


def _divides(parameter: Parameter, stored: Stored, config: ModelConfig) -> bool:
    """Whether devices hold equal parts of every array of a parameter, as it is stored."""
    if stored.quantised and config.kernels.platform == "cpu":
        return False  # Packed part by part.
    cuts = cuts_of(parameter, config)
    even = all(cut.padded == size for cut, size in zip(cuts, parameter.shape, strict=True))
    groups = (leaf.shape[-1] % cuts[-1].degree == 0 for leaf in stored.leaves.values())
    whole_groups = not stored.quantised or cuts[-1].width % stored.statics["group"] == 0
    return even and all(groups) and whole_groups


class OrbaxArrays:
    """Arrays of an Orbax tree, read into host memory."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder

    def leaves(self) -> Mapping[str, Leaf]:
        """Names, shapes and types of all arrays, as Orbax has them."""
        with _checkpointer() as checkpointer:
            try:
                tree = checkpointer.metadata(_tree_folder(self._folder)).item_metadata
            except (OSError, ValueError, KeyError) as error:
                raise _damaged(self._folder, error) from None
        if tree is None:
            raise _damaged(self._folder, "what describes it, or one of its arrays, is damaged")
        found = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(dict(tree)):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            found[name] = Leaf(str(np.dtype(leaf.dtype)), tuple(leaf.shape))
        return found

    def load(self, stored: Stored, index: Index) -> Mapping[str, np.ndarray]:
        """As `native.Arrays.load`."""
        return {
            name: self._read(name, stored.leaf_index(leaf, index))
            for name, leaf in stored.arrays().items()
        }

    def release(self, stored: Stored) -> None:
        """Nothing is mapped."""

    @property
    def file_bytes(self) -> int:
        """Bytes of all files of the tree."""
        files = _tree_folder(self._folder).rglob("*")
        return sum(path.stat().st_size for path in files if path.is_file())

    def _read(self, name: str, index: Index) -> np.ndarray:
        """What slices of its axes are of one array: Orbax itself reads by shardings alone."""
        _orbax()
        tensorstore: Any = importlib.import_module("tensorstore")
        path = str(_tree_folder(self._folder) / name)
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": path}}
        try:
            return np.asarray(tensorstore.open(spec, open=True).result()[index].read().result())
        except (OSError, ValueError, KeyError) as error:
            raise _damaged(self._folder, error) from None


def _restore(
    folder: pathlib.Path, leaves: Mapping[str, Leaf], arguments: Callable[[str, Leaf], Any]
) -> dict[str, Any]:
    """The arrays of these names, each restored as its arguments say."""
    ocp = _orbax()
    item = {
        name: jax.ShapeDtypeStruct(leaf.shape, DTYPES[leaf.dtype]) for name, leaf in leaves.items()
    }
    how = {name: arguments(name, leaf) for name, leaf in leaves.items()}
    with _checkpointer() as checkpointer:
        try:
            tree = checkpointer.restore(
                _tree_folder(folder),
                args=ocp.args.PyTreeRestore(
                    item=_nested(item), restore_args=_nested(how), partial_restore=True
                ),
            )
        except (OSError, ValueError, KeyError) as error:
            raise _damaged(folder, error) from None
    return {name: _at(tree, name) for name in leaves}


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names as nested dicts."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def _at(tree: Any, name: str) -> Any:
    for part in name.split("."):
        tree = tree[part]
    return tree


def _tree_folder(folder: pathlib.Path) -> pathlib.Path:
    # Orbax takes absolute paths only.
    return (folder / FOLDER).absolute()


@contextlib.contextmanager
def _checkpointer() -> Iterator[Any]:
    """Orbax's checkpointer of trees.

    A file to each array rather than its database of many: that one would hold a second copy of the
    whole tree in memory until it is written.
    """
    ocp = _orbax()
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, save_concurrent_gb=1)
    remarks = logging.getLogger("absl")
    level = remarks.level
    # What Orbax remarks on every save and restore is not for users.
    remarks.setLevel(logging.ERROR)
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            yield checkpointer
    finally:
        remarks.setLevel(level)


def _orbax() -> Any:
    """The library, imported when it is first needed: it takes a second."""
    try:
        return importlib.import_module("orbax.checkpoint")
    except ImportError:
        raise StokerError(
            "Orbax checkpoints need the package orbax-checkpoint; pip install 'stoker[orbax]'"
        ) from None


def _damaged(folder: pathlib.Path, why: object) -> StokerError:
    said = " ".join(str(why).split())
    return StokerError(
        f"'{folder / FOLDER}' cannot be read as an Orbax checkpoint ({said:.160}); convert the "
        "model again"
    )
