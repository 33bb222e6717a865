"""From a model's name to its configuration, parameters and tokenizer."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .checkpoints.gguf import GGUFCheckpoint
from .checkpoints.prequantised import QuantisedCheckpoint, QuantisedTensor, open_prequantised
from .checkpoints.safetensors import SafetensorsCheckpoint, is_safetensors_folder
from .config import Kernels, ModelConfig
from .errors import StokerError
from .families import Family, family_for, family_of_type
from .families.gguf_config import model_config as config_from_gguf
from .families.hf_config import ConfigJson
from .families.hf_config import model_config as config_from_json
from .families.naming import Naming, TensorUse
from .host_arrays import Arena, aligned_empty
from .json_files import read_json
from .ops import cpu
from .parameters import Parameter, Params, abstract_params, named_parameters, unflatten
from .quantized import QuantArray, dequantize
from .sources import DEFAULT_MODEL, resolve
from .tokenizers.base import Tokenizer
from .tokenizers.folder import tokenizer_from_folder
from .tokenizers.gguf import tokenizer_from_gguf

_LOG = logging.getLogger("stoker")

Checkpoint = GGUFCheckpoint | SafetensorsCheckpoint | QuantisedCheckpoint
#: Called with the bytes done and the bytes in all.
Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class Model:
    """A model ready to run.

    Attributes:
      name: as it was asked for.
      path: the file (of a split model: its first shard), or the folder of safetensors files.
      config: the architecture.
      params: the tree of `abstract_params(config)`, of JAX arrays and `QuantArray`s.
      tokenizer: of the checkpoint; None where weights are random.
      file_bytes: size of the checkpoint.
      load_seconds: from the name to the parameters on the device; None likewise.
    """

    name: str
    path: pathlib.Path
    config: ModelConfig
    params: Params = dataclasses.field(repr=False)
    tokenizer: Tokenizer | None = dataclasses.field(repr=False)
    file_bytes: int
    load_seconds: float | None


def load_model(
    name: str | os.PathLike[str] = DEFAULT_MODEL,
    *,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    kernels: str | None = None,
    activations: str | None = None,
    progress: Progress | None = None,
) -> Model:
    """Loads a model by alias, GGUF file (any shard of a split one), folder or `hf:` name.

    Everything is checked before any tensor is read: header, configuration, names, shapes, types
    and tokenizer.

    Args:
      name: what `resolve` takes.
      dtype: of activations; by default float32 on CPU and bfloat16 elsewhere.
      kv_dtype: of cached keys and values; by default `dtype`, but bfloat16 beside int8 activations.
      kernels: "xla" or "cpu"; by default what `choose_kernels` says.
      activations: "float32" or "int8"; likewise.
      progress: told how many bytes of the checkpoint have been read.

    Raises:
      StokerError: the model cannot be found, is damaged or is not supported.
    """
    start = time.perf_counter()
    path = resolve(name)
    opened = open_checkpoint(path)
    chosen = choose_kernels(kernels, activations)
    config = choose_numerics(opened.config, dtype, kv_dtype, chosen)
    check_tensors(opened.checkpoint, opened.family, config)
    tokenizer = opened.tokenizer()
    # More rows than tokens is padding; fewer would leave tokens without an embedding.
    if tokenizer.vocab_size > config.vocab_size:
        raise StokerError(
            f"the vocabulary of '{name}' has {tokenizer.vocab_size} tokens but its embedding only "
            f"{config.vocab_size} rows; convert the model again"
        )
    params = load_params(opened.checkpoint, opened.family, config, progress=progress)
    jax.block_until_ready(params)
    seconds = time.perf_counter() - start
    return Model(str(name), path, config, params, tokenizer, opened.checkpoint.file_bytes, seconds)


@dataclasses.dataclass(frozen=True)
class Opened:
    """A checkpoint of which no tensor has been read.

    Attributes:
      checkpoint: its tensors.
      family: of the model.
      config: the architecture, in float32 and with the reference kernels.
      tokenizer: makes the tokenizer.
    """

    checkpoint: Checkpoint
    family: Family
    config: ModelConfig
    tokenizer: Callable[[], Tokenizer]


def open_checkpoint(path: pathlib.Path) -> Opened:
    """Opens a GGUF file or a folder of safetensors files, as `resolve` finds them.

    Raises:
      StokerError: it is damaged, or its architecture is not supported.
    """
    if is_safetensors_folder(path):
        json = ConfigJson(read_json(path / "config.json"))
        family = family_of_type(json.value("model_type"))
        files: Checkpoint
        if json.has("quantization_config"):
            files = open_prequantised(path, json.value("quantization_config"))
        else:
            files = SafetensorsCheckpoint.open(path)
        config = config_from_json(family, json, files.tensors)
        return Opened(files, family, config, lambda: tokenizer_from_folder(path))
    gguf = GGUFCheckpoint.open(path)
    family = family_for(gguf.metadata.get("general.architecture"))
    config = config_from_gguf(family, gguf)
    return Opened(gguf, family, config, lambda: tokenizer_from_gguf(gguf.metadata))


def naming_of(checkpoint: Checkpoint, family: Family) -> Naming:
    """How this kind of checkpoint calls the parameters of `family`."""
    naming = family.gguf if isinstance(checkpoint, GGUFCheckpoint) else family.hf
    return naming.fitting(checkpoint.tensors)


def choose_numerics(
    config: ModelConfig, dtype: str | None, kv_dtype: str | None, kernels: Kernels
) -> ModelConfig:
    """`config` with these types and kernels; `load_model` says what None stands for."""
    if dtype is None:
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if kv_dtype is None:
        kv_dtype = "bfloat16" if kernels.activations == "int8" else dtype
    return dataclasses.replace(config, dtype=dtype, kv_dtype=kv_dtype, kernels=kernels)


def choose_kernels(platform: str | None = None, activations: str | None = None) -> Kernels:
    """The kernels to run: those asked for, or the fastest that this machine has.

    On a CPU these are the compiled kernels, with int8 activations; where they are missing, a
    warning says why and what to do, and the reference serves. Elsewhere it is the reference.

    Raises:
      StokerError: what was asked for is unknown, or not to be had.
    """
    on_cpu = jax.default_backend() == "cpu"
    if platform == "cpu" and not (on_cpu and cpu.load()):
        why = cpu.why_unavailable() if on_cpu else f"this is a {jax.default_backend()} host"
        raise StokerError(f"kernels 'cpu' were asked for, but are not to be had: {why}")
    if platform is None:
        platform = "cpu" if on_cpu and cpu.load() else "xla"
        if on_cpu and platform == "xla":
            _LOG.warning("stoker: %s", cpu.why_unavailable())
    if activations is None:
        activations = "int8" if platform == "cpu" else "float32"
    return Kernels(platform, activations)


def check_tensors(checkpoint: Checkpoint, family: Family, config: ModelConfig) -> None:
    """Raises `StokerError` unless the files hold exactly the parameters, in their shapes.

    A missing tensor, one of another shape and one that no parameter uses are each named.
    """
    naming, tensors = naming_of(checkpoint, family), checkpoint.tensors
    uses = {name: use for use in naming.uses(config).values() for name in use.tensors}
    missing = [name for name in uses if name not in tensors]
    if missing:
        raise StokerError(f"the file lacks {_some(missing)}; give a complete checkpoint")
    for name, use in uses.items():
        wanted = use.shape
        if _is_turned(checkpoint, name, use):
            wanted = (*wanted[:-2], wanted[-1], wanted[-2])
        if tensors[name].shape != wanted:
            raise StokerError(
                f"tensor '{name}' has shape {list(tensors[name].shape)} where the configuration "
                f"needs {list(wanted)}; convert the model again"
            )
    unused = tensors.keys() - uses.keys() - naming.spare_tensors(config)
    unused = {name for name in unused if not naming.unread(name, config)}
    if unused:
        raise StokerError(
            f"the file has {_some(sorted(unused))}, which family '{family.name}' does not use; "
            "give a model without it, since leaving it out would change the results"
        )


def load_params(
    checkpoint: Checkpoint,
    family: Family,
    config: ModelConfig,
    *,
    place: Callable[[str, np.ndarray], jax.Array] = lambda _, leaf: jax.device_put(leaf),
    progress: Progress | None = None,
) -> Params:
    """The parameters of a checkpoint that passed `check_tensors`, on the device.

    Tensors are converted one by one, the largest first, and each one's pages of the file are given
    back before the next, so memory peaks near the size of the parameters themselves.

    Args:
      checkpoint: an open checkpoint.
      family: of the checkpoint.
      config: the architecture of the checkpoint.
      place: puts one leaf of a parameter (given its dotted path) on the device or devices.
      progress: told how many bytes of tensors have been read.

    Returns:
      The tree of `abstract_params(config)`: quantised matrices as `QuantArray` (packed where the
      CPU kernels run), dense ones in the file's own type, norms and biases in float32.
    """
    abstract = abstract_params(config)
    naming, tensors = naming_of(checkpoint, family), checkpoint.tensors
    uses = naming.uses(config)
    parameters = dict(named_parameters(abstract))
    # Several parameters may share a tensor: each reads its part of it.
    sizes = {
        path: sum(tensors[name].nbytes for name in use.tensors)
        * parameters[path].size
        // (len(use.tensors) * math.prod(use.shape))
        for path, use in uses.items()
    }
    total, done = sum(sizes.values()), 0
    values: dict[str, Any] = {}
    arena, widened = Arena(), 0
    for path in sorted(parameters, key=lambda path: -sizes[path]):
        order = naming.row_order(path, config)
        value = _parameter(checkpoint, uses[path], parameters[path], order, config.compute_dtype)
        packs = isinstance(value, QuantArray)
        if config.kernels.platform == "cpu" and packs:
            value = cpu.prepare(value, arena.empty)
            widened += not isinstance(value, cpu.PackedArray)
        values[path] = jax.tree.map(lambda leaf, path=path: place(path, leaf), value)
        done += sizes[path]
        if progress is not None:
            progress(done, total)
    if widened:
        _LOG.warning(
            "stoker: %d matrices of 8-bit floats are held as bfloat16 or float32, since the CPU "
            "kernels multiply with integers only; kernels='xla' keeps them as they are",
            widened,
        )
    return unflatten(abstract, values)


def _parameter(
    checkpoint: Checkpoint,
    use: TensorUse,
    parameter: Parameter,
    order: np.ndarray | None,
    dtype: np.dtype,
) -> Any:
    """One parameter with NumPy leaves, its rows in `order` where that is given.

    Quantised matrices that cannot stay so take `dtype`, in which they are multiplied.
    """
    value: Any = None if use.outputs is None else _outputs(checkpoint, use)
    for index, name in enumerate(use.tensors if value is None else ()):
        part: Any = checkpoint.load(name, use.rows)
        checkpoint.release(name)
        if use.heads or (len(use.tensors) == 1 and part.shape == parameter.shape):
            value = part
            continue
        if value is None:
            value = _stack_like(part, len(use.tensors))
        _put(value, index, part, name)
    if parameter.dtype != "any":
        dense = dequantize(value) if isinstance(value, QuantArray) else value
        value = np.asarray(dense, parameter.dtype) + np.asarray(use.added, parameter.dtype)
    # A gather of rows moves codes and scales together: nothing is requantised.
    value = value if order is None else jax.tree.map(lambda leaf: leaf[order], value)
    return _by_heads(value, use, dtype) if use.heads else value


def _by_heads(value: Any, use: TensorUse, dtype: np.dtype) -> Any:
    """A matrix `[heads * R, C]` as `[heads, R, C]`, or `[heads, C, R]` where it is transposed."""
    if use.transposed and isinstance(value, QuantArray):
        value = np.asarray(dequantize(value, dtype))
    value = jax.tree.map(lambda leaf: leaf.reshape(use.heads, -1, *leaf.shape[1:]), value)
    if not use.transposed:
        return value
    turned = value.swapaxes(1, 2)
    dense = aligned_empty(turned.shape, turned.dtype)
    dense[...] = turned
    return dense


def _is_turned(checkpoint: Checkpoint, name: str, use: TensorUse) -> bool:
    """Whether a tensor holds the transposes of its matrices."""
    return use.turned_floats and not isinstance(checkpoint.tensors[name], QuantisedTensor)


def _outputs(checkpoint: Checkpoint, use: TensorUse) -> Any:
    """The parameter that is some outputs of each expert in one tensor, an expert at a time."""
    (name,), value = use.tensors, None
    turned = _is_turned(checkpoint, name, use)
    for expert in range(use.shape[0]):
        part: Any = checkpoint.load(name, slice(expert, expert + 1))
        part = jax.tree.map(
            lambda leaf: (leaf[0].swapaxes(0, 1) if turned else leaf[0])[use.outputs], part
        )
        if value is None:
            value = _stack_like(part, use.shape[0])
        _put(value, expert, part, name)
    checkpoint.release(name)
    return value


def _stack_like(part: Any, count: int) -> Any:
    """Room for `count` arrays, quantised or not, like `part`."""
    return jax.tree.map(lambda leaf: aligned_empty((count, *leaf.shape), leaf.dtype), part)


def _put(stack: Any, index: int, part: Any, name: str) -> None:
    """Puts an array into a stack; StokerError where it is of another format than the first."""
    slots = jax.tree.map(lambda leaf: leaf[index], stack)
    kinds = [
        (jax.tree.structure(it), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(it)])
        for it in (slots, part)
    ]
    if kinds[0] != kinds[1]:
        raise StokerError(
            f"tensor '{name}' is of another format than those of the other experts of its layer, "
            "which is not supported; give a model whose experts are all alike"
        )
    jax.tree.map(lambda slot, leaf: np.copyto(slot, leaf), slots, part)


def _some(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:3])
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{rest}"
