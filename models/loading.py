"""From a model's name to its configuration, parameters and tokenizer."""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ..sharding import Rules, Team
from .checkpoints.gguf import GGUFCheckpoint
from .checkpoints.manifest import is_native_folder
from .checkpoints.native import NativeCheckpoint
from .checkpoints.prequantised import QuantisedCheckpoint, open_prequantised
from .checkpoints.reading import Progress, is_turned, read_parameters, reported
from .checkpoints.safetensors import SafetensorsCheckpoint, is_safetensors_folder
from .config import PALLAS, Kernels, ModelConfig
from .errors import StokerError
from .families import Family, family_for, family_of_name, family_of_type
from .families.gguf_config import model_config as config_from_gguf
from .families.hf_config import ConfigJson
from .families.hf_config import model_config as config_from_json
from .families.naming import Naming
from .host_arrays import Arena
from .host_threads import at_once
from .json_files import read_json
from .ops import cpu
from .parameters import Params, abstract_params, named_parameters, unflatten
from .placing.placement import Reader, place_parameter, split_config
from .quantise import Quantisation
from .quantized import QuantArray, ready
from .sources import DEFAULT_MODEL, resolve
from .tokenizers.base import Tokenizer
from .tokenizers.folder import tokenizer_from_folder
from .tokenizers.gguf import tokenizer_from_gguf
from .tokenizers.native import tokenizer_from_native

_LOG = logging.getLogger("stoker")

Checkpoint = GGUFCheckpoint | SafetensorsCheckpoint | QuantisedCheckpoint | NativeCheckpoint


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
      mesh: the devices that the model is split over, as `config.split` says; None for one device.
      team: ties of process 0 to the others, where the mesh has devices of several processes.
    """

    name: str
    path: pathlib.Path
    config: ModelConfig
    params: Params = dataclasses.field(repr=False)
    tokenizer: Tokenizer | None = dataclasses.field(repr=False)
    file_bytes: int
    load_seconds: float | None
    mesh: jax.sharding.Mesh | None = None
    team: Team | None = dataclasses.field(default=None, repr=False)


def load_model(
    name: str | os.PathLike[str] = DEFAULT_MODEL,
    *,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    kernels: str | None = None,
    activations: str | None = None,
    quantize: str | Quantisation | None = None,
    mesh: jax.sharding.Mesh | None = None,
    rules: Rules | None = None,
    progress: Progress | None = None,
) -> Model:
    """Loads a model by alias, GGUF file (any shard of a split one), folder or `hf:` name.

    Everything is checked before any tensor is read: header, configuration, names, shapes, types
    and tokenizer.

    Args:
      name: what `resolve` takes.
      dtype: of activations; by default float32 on CPU and bfloat16 elsewhere.
      kv_dtype: of cached keys and values; by default `dtype`, but bfloat16 beside int8 activations.
      kernels: one of `config.PLATFORMS`; by default what `choose_kernels` says.
      activations: "float32" or "int8"; likewise.
      quantize: makes the dense matrices of the checkpoint int8 or int4 as they are read, for
        example "int4:group=64" (see `Quantisation.parse`).
      mesh: devices to split the model over, each of which gets its part straight from the file.
      rules: in place of those of `sharding.RULES` for the logical axes they name.
      progress: told how many bytes of the checkpoint have been read.

    Raises:
      StokerError: the model cannot be found, is damaged or is not supported.
    """
    start = time.perf_counter()
    how = Quantisation.parse(quantize) if isinstance(quantize, str) else quantize
    path = resolve(name)
    opened = open_checkpoint(path)
    chosen = choose_kernels(kernels, activations)
    config = choose_numerics(opened.config, dtype, kv_dtype, chosen)
    if mesh is not None:
        config = split_config(config, mesh, rules)
    check_tensors(opened.checkpoint, opened.family, config)
    tokenizer = opened.tokenizer()
    check_vocabulary(name, tokenizer, config)
    params = load_params(
        opened.checkpoint, opened.family, config, mesh=mesh, quantise=how, progress=progress
    )
    jax.block_until_ready(params)
    seconds, size = time.perf_counter() - start, opened.checkpoint.file_bytes
    return Model(str(name), path, config, params, tokenizer, size, seconds, mesh)


@dataclasses.dataclass(frozen=True)
class Opened:
    """A checkpoint of which no tensor has been read.

    Attributes:
      path: the file (of a split model: its first shard) or the folder.
      checkpoint: its tensors.
      family: of the model.
      config: the architecture, in float32 and with the reference kernels.
      tokenizer: makes the tokenizer.
    """

    path: pathlib.Path
    checkpoint: Checkpoint
    family: Family
    config: ModelConfig
    tokenizer: Callable[[], Tokenizer]


def open_checkpoint(path: pathlib.Path) -> Opened:
    """Opens a GGUF file, a folder of safetensors files or one of Stoker's own, as `resolve` finds.

    Raises:
      StokerError: it is damaged, or its architecture is not supported.
    """
    if is_native_folder(path):
        native = NativeCheckpoint.open(path)
        family = family_of_name(native.config.family)
        return Opened(path, native, family, native.config, lambda: tokenizer_from_native(path))
    if is_safetensors_folder(path):
        json = ConfigJson(read_json(path / "config.json"))
        family = family_of_type(json.value("model_type"))
        files: Checkpoint
        if json.has("quantization_config"):
            files = open_prequantised(path, json.value("quantization_config"))
        else:
            files = SafetensorsCheckpoint.open(path)
        config = config_from_json(family, json, files.tensors)
        return Opened(path, files, family, config, lambda: tokenizer_from_folder(path))
    gguf = GGUFCheckpoint.open(path)
    family = family_for(gguf.metadata.get("general.architecture"))
    config = config_from_gguf(family, gguf)
    return Opened(path, gguf, family, config, lambda: tokenizer_from_gguf(gguf.metadata))


def naming_of(checkpoint: Checkpoint, family: Family) -> Naming:
    """How this kind of checkpoint calls the parameters of `family`."""
    if isinstance(checkpoint, NativeCheckpoint):
        return checkpoint.naming
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
    warning says why and what to do, and the reference serves. On TPUs and GPUs it is the Pallas
    kernels, or what `ops.choices` says for each operation; elsewhere, the reference.

    Raises:
      StokerError: what was asked for is unknown, or not to be had.
    """
    backend = jax.default_backend()
    on_cpu = backend == "cpu"
    if platform in PALLAS and platform != backend:
        raise StokerError(
            f"kernels '{platform}' were asked for, but this is a {backend} host; use kernels='xla'"
        )
    if platform == "cpu" and not (on_cpu and cpu.load()):
        why = cpu.why_unavailable() if on_cpu else f"this is a {backend} host"
        raise StokerError(f"kernels 'cpu' were asked for, but are not to be had: {why}")
    if platform is None:
        platform = "cpu" if on_cpu and cpu.load() else "xla"
        if backend in PALLAS:
            platform = backend
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
        if is_turned(checkpoint, name, use):
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


def check_vocabulary(
    name: str | os.PathLike[str], tokenizer: Tokenizer, config: ModelConfig
) -> None:
    """Raises `StokerError` where tokens would have no embedding; more rows are padding."""
    if tokenizer.vocab_size > config.vocab_size:
        raise StokerError(
            f"the vocabulary of '{name}' has {tokenizer.vocab_size} tokens but its embedding only "
            f"{config.vocab_size} rows; convert the model again"
        )


def load_params(
    checkpoint: Checkpoint,
    family: Family,
    config: ModelConfig,
    *,
    place: Callable[[str, np.ndarray], jax.Array] = lambda _, leaf: jax.device_put(leaf),
    quantise: Quantisation | None = None,
    mesh: jax.sharding.Mesh | None = None,
    progress: Progress | None = None,
) -> Params:
    """The parameters of a checkpoint that passed `check_tensors`, on the device.

    Tensors are converted by all processors, the largest first, as many at once as fit beside each
    other (see `at_once`; one by one where they are quantised, come in a layout that is unpacked
    whole, or are placed on a mesh), and each one's pages of the file are given back after it, so
    memory peaks near the size of the parameters.

    Args:
      checkpoint: an open checkpoint.
      family: of the checkpoint.
      config: the architecture of the checkpoint.
      place: puts one leaf of a parameter (given its dotted path) on the device; called by threads.
      mesh: places parameters instead, as `config.split` says; they are read part by part.
      quantise: what becomes of dense matrices; None: they stay dense.
      progress: told how many bytes of tensors have been read.

    Returns:
      The tree of `abstract_params(config)`: quantised matrices as `QuantArray` (packed where the
      CPU kernels run), dense ones in the file's own type, norms and biases in float32.
    """
    arena = Arena()
    # Threads do not share the caller's context.
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    parameters = dict(named_parameters(abstract_params(config)))
    widened: list[str] = []

    def make(named: tuple[str, Reader]) -> Any:
        path, read = named
        if mesh is not None:
            return place_parameter(parameters[path], config, mesh, read, arena.empty)
        with jax.default_device(device):
            value = read()
            if isinstance(value, QuantArray) and config.kernels.platform == "cpu":
                value = cpu.prepare(value, arena.empty)
                if not isinstance(value, cpu.PackedArray):
                    widened.append(path)
            elif isinstance(value, QuantArray) and config.kernels.platform == "tpu":
                value = ready(value)
            return jax.tree.map(lambda leaf: place(path, leaf), value)

    naming = naming_of(checkpoint, family)
    readers = read_parameters(checkpoint, naming, config, quantise=quantise)
    sizes = [read.nbytes for read in readers.values()]
    # Parts of a mesh are placed one after the other, in the same order by all processes; and what
    # quantises has every core at work already, and much memory.
    alone = mesh is not None or quantise is not None or _grows(checkpoint)
    made = at_once(make, list(readers.items()), sizes, threads=1 if alone else None)
    values = dict(zip(readers, reported(made, sizes, progress), strict=True))
    if widened:
        _LOG.warning(
            "stoker: %d matrices of 8-bit floats (or groups that are not whole fours) are held as "
            "bfloat16 or float32, since the CPU kernels multiply with integers only; kernels='xla' "
            "keeps them as they are",
            len(widened),
        )
    return unflatten(abstract_params(config), values)


def _grows(checkpoint: Checkpoint) -> bool:
    """Whether parameters may take several times their bytes of the file while they are read."""
    if isinstance(checkpoint, NativeCheckpoint):
        return any("float8" in leaf.dtype for leaf in checkpoint.manifest.leaves.values())
    return isinstance(checkpoint, QuantisedCheckpoint)


def _some(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:3])
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{rest}"
