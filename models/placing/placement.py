"""Puts parameters on the devices of a mesh, each device's part straight from where it is read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ...sharding import Cut, Rules, even_cut, split_of, wide_cut
from ..config import ModelConfig
from ..errors import StokerError
from ..host_arrays import Empty, aligned_empty
from ..ops.cpu import PackedArray, can_pack, pack
from ..parameters import Parameter, Params, abstract_params, is_weight, named_parameters, unflatten
from ..quantized import QuantArray, dequantize, ready
from ..random_weights import matrix_shape
from .cutting import Span, divisible, part_of, step_of

#: Where a part of a parameter lies along each axis.
Box = tuple[Span, ...]


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads one parameter, or parts of it.

    Attributes:
      unit: elements of the last axis that can only be read together: slices of it begin at
        multiples of this, and end at others or with the axis.
      part: a part, with NumPy leaves, by slices of the axes; the last ones may be left out.
      nbytes: what the parameter takes where it is read from; 0 where nobody asks.
    """

    unit: int
    part: Callable[[tuple[slice, ...]], Any]
    nbytes: int = 0

    def __call__(self, *index: slice) -> Any:
        """The parameter, or what these slices of its axes are."""
        return self.part(index)


def split_config(config: ModelConfig, mesh: Mesh, rules: Rules | None = None) -> ModelConfig:
    """`config` for the devices of `mesh`; `rules` take the place of those they name.

    Raises:
      StokerError: for rules that contradict each other.
    """
    try:
        return dataclasses.replace(config, split=split_of(mesh, rules))
    except ValueError as error:
        raise StokerError(str(error)) from None


def cuts_of(parameter: Parameter, config: ModelConfig) -> tuple[Cut, ...]:
    """Where each axis of a parameter is cut."""
    split, heads = config.split, config.heads
    targets = split.resolve(parameter.axes)
    cuts = []
    for name, size, target in zip(parameter.axes, parameter.shape, targets, strict=True):
        degree = split.size(target)
        if degree > 1 and name == "heads":
            cuts.append(heads.query.times(size // config.n_heads))
        elif degree > 1 and name == "kv_heads":
            cuts.append(heads.kv.times(size // config.n_kv_heads))
        else:
            cuts.append((wide_cut if name == "ff" else even_cut)(size, degree))
    return tuple(cuts)


def place_params(params: Params, config: ModelConfig, mesh: Mesh) -> Params:
    """`params` on the devices of `mesh`, split as `config.split` says.

    Quantised matrices are packed, part by part, where the CPU kernels multiply with them.

    Raises:
      StokerError: for weights that are packed already, whole.
    """
    leaves = jax.tree.leaves(params, is_leaf=is_weight)
    if any(isinstance(leaf, PackedArray) for leaf in leaves):
        raise StokerError(
            "weights packed for the CPU kernels cannot be split over a mesh; give them as they "
            "were, and they are packed part by part"
        )
    values = {}
    for (name, parameter), value in zip(
        named_parameters(abstract_params(config)), leaves, strict=True
    ):

        def part(index: tuple[slice, ...], value: Any = value) -> Any:
            return jax.tree.map(lambda leaf: np.asarray(leaf[index[: value.ndim - 1]]), value)

        # Columns are cut here rather than where the values are, on some device.
        reader = Reader(value.shape[-1], part)
        values[name] = place_parameter(parameter, config, mesh, reader)
    return unflatten(abstract_params(config), values)


def place_parameter(
    parameter: Parameter,
    config: ModelConfig,
    mesh: Mesh,
    read: Reader,
    empty: Empty = aligned_empty,
) -> Any:
    """One parameter on the devices of `mesh`.

    Only what this process's devices hold is read, part by part, and what they share once. Leaves
    are arrays over the whole mesh, with padding and repetitions; the static fields of a
    `QuantArray` or `PackedArray` are those of a part, which is what steps see inside
    `jax.shard_map`.
    """
    cuts = cuts_of(parameter, config)
    spec = config.split.spec(parameter.axes)
    boxes = _boxes_by_device(mesh, spec, cuts)
    sizes = [cut.width for cut in cuts]
    step = step_of(cuts[-1], parameter.shape[-1])
    placed: dict[jax.Device, Any] = {}
    for wanted, held in _readings(boxes.values(), parameter.shape, math.lcm(read.unit, step)):
        whole = divisible(read(*(slice(*span) for span in wanted)), step)
        for box in held:
            own = ((a - at, b - at) for (a, b), (at, _) in zip(box, wanted, strict=True))
            value = part_of(whole, list(own), sizes)
            devices = [device for device, other in boxes.items() if other == box]
            value = _as_multiplied(value, config, devices[0], empty)
            for device in devices:
                placed[device] = jax.device_put(value, device)
        # What is placed must not stay while the next part is read.
        del whole, value
    some = next(iter(placed.values()))
    columns = [jax.tree.leaves(value) for value in placed.values()]
    leaves = []
    for arrays in zip(*columns, strict=True):
        # Scales of one part may need float32 where those of others did not.
        if len({array.dtype for array in arrays}) > 1:
            arrays = tuple(array.astype(jnp.result_type(*arrays)) for array in arrays)
        # Packed tiles have an axis of bytes after that of columns.
        entries = (*spec, *(None,) * (arrays[0].ndim - len(spec)))
        degrees = (*(cut.degree for cut in cuts), *(1,) * (arrays[0].ndim - len(cuts)))
        shape = tuple(n * d for n, d in zip(arrays[0].shape, degrees, strict=True))
        sharding = NamedSharding(mesh, PartitionSpec(*entries))
        leaves.append(jax.make_array_from_single_device_arrays(shape, sharding, list(arrays)))
    return jax.tree.unflatten(jax.tree.structure(some), leaves)


def _as_multiplied(value: Any, config: ModelConfig, device: jax.Device, empty: Empty) -> Any:
    """A part as the kernels want it: packed, or with types that they can load."""
    if not isinstance(value, QuantArray):
        return value
    if config.kernels.platform == "cpu":
        with jax.default_device(device):
            return pack(value, empty) if can_pack(value) else dequantize(value)
    return ready(value) if config.kernels.platform == "tpu" else value


def shape_params(
    config: ModelConfig,
    mesh: Mesh | None,
    weights: str = "bfloat16",
    device: jax.Device | None = None,
) -> Params:
    """The parameters as shapes, as `place_params` would place random ones: nothing is allocated.

    For compiling steps for machines that are not there, and for counting what each device holds.

    Args:
      config: the architecture; its kernels say how quantised matrices lie.
      mesh: what they are split over, as `config.split` says; None for one device.
      weights: format of the matrices, one of `random_weights.WEIGHTS`.
      device: the one, if not JAX's own first.

    Raises:
      StokerError: where a device's columns do not divide into quantisation groups.
    """
    values = {}
    for name, parameter in named_parameters(abstract_params(config)):
        cuts = cuts_of(parameter, config)
        own = tuple(cut.width for cut in cuts)
        if parameter.dtype == "any":
            part = matrix_shape(own, weights, config.kernels)
        else:
            part = jax.ShapeDtypeStruct(own, parameter.dtype)
        spec = config.split.spec(parameter.axes)
        placement = SingleDeviceSharding(device) if device else None

        def placed(leaf: Any, cuts: Any = cuts, spec: Any = spec, one: Any = placement) -> Any:
            degrees = (cut.degree for cut in cuts)
            shape = tuple(n * degree for n, degree in zip(leaf.shape, degrees, strict=True))
            sharding = NamedSharding(mesh, spec) if mesh is not None else one
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

        values[name] = jax.tree.map(placed, part)
    return unflatten(abstract_params(config), values)


def _boxes_by_device(
    mesh: Mesh, spec: PartitionSpec, cuts: tuple[Cut, ...]
) -> dict[jax.Device, Box]:
    """Which part each of this process's devices holds."""
    degrees = tuple(cut.degree for cut in cuts)
    indices = NamedSharding(mesh, spec).addressable_devices_indices_map(degrees)
    return {
        device: tuple(
            cut.ranges[place.start or 0] for cut, place in zip(cuts, index or (), strict=True)
        )
        for device, index in indices.items()
    }


def _readings(
    boxes: Iterable[Box], shape: tuple[int, ...], together: int
) -> Iterator[tuple[Box, list[Box]]]:
    """What to read at a time, and which of `boxes` lie in it.

    Columns are read by multiples of `together`, and those that several boxes need only once.
    Padding alone, an empty box, takes its format from what is there.
    """
    columns = shape[-1]

    def spans(box: Box) -> tuple[list[Span], Span]:
        start, end = box[-1]
        first = min(start, columns - 1) // together * together
        last = min(-(-max(end, first + 1) // together) * together, columns)
        return [(a, b) if a < b else (0, 1) for a, b in box[:-1]], (first, last)

    held: list[Box] = []
    wanted: tuple[list[Span], Span] = ([], (0, 0))
    for box in sorted({*boxes}, key=spans):
        rows, (first, last) = spans(box)
        if held and rows == wanted[0] and first < wanted[1][1]:
            wanted = (rows, (wanted[1][0], max(last, wanted[1][1])))
        else:
            if held:
                yield (*wanted[0], wanted[1]), held
            held, wanted = [], (rows, (first, last))
        held.append(box)
    yield (*wanted[0], wanted[1]), held


def placement_report(config: ModelConfig) -> tuple[str, ...]:
    """What of a model does not divide by the mesh, and what was done: a sentence each."""
    lines = []
    heads, split = config.heads, config.split
    if heads.query.padded != config.n_heads:
        lines.append(
            f"{config.n_heads} query heads on {heads.query.degree} devices: padded to "
            f"{heads.query.padded}, {heads.query.width} each"
        )
    if heads.repeats > 1:
        lines.append(
            f"{config.n_kv_heads} KV heads on {heads.kv.degree} devices: each is on "
            f"{heads.repeats} of them"
        )
    if heads.kv.padded // heads.repeats != config.n_kv_heads:
        lines.append(
            f"{config.n_kv_heads} KV heads on {heads.kv.degree} devices: padded to "
            f"{heads.kv.padded // heads.repeats}"
        )
    seen = set()
    for _, parameter in named_parameters(abstract_params(config)):
        cuts = cuts_of(parameter, config)
        for name, size, cut in zip(parameter.axes, parameter.shape, cuts, strict=True):
            uneven = name in ("vocab", "ff", "experts") and cut.padded != size
            if uneven and (name, size) not in seen:
                seen.add((name, size))
                what = {"vocab": "tokens", "ff": "feed-forward columns"}.get(name or "", name)
                lines.append(f"{size} {what} on {cut.degree} devices: padded to {cut.padded}")
    for name, size in split.mesh:
        if size > 1 and not any(name in axes for axes in map(split.axes, dict(split.rules))):
            lines.append(f"mesh axis {name}:{size} divides nothing: its devices do the same")
    return tuple(lines)
