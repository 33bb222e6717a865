"""Meshes of devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax

#: The axes of a mesh, from the outermost to the innermost, whose neighbours talk most: replicas of
#: the model, parts of a context, experts, and heads and columns.
AXES = ("data", "sequence", "expert", "tensor")


def parse_mesh(text: str) -> dict[str, int]:
    """The axes and sizes that a flag such as `data:2,tensor:4` names; an empty one names none.

    Raises:
      ValueError: for an unknown axis, one given twice, or a size that is no positive number.
    """
    axes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, size = (piece.strip() for piece in part.partition(":"))
        if name not in AXES:
            raise ValueError(f"a mesh has no axis '{name}'; use {', '.join(AXES)}")
        if name in axes:
            raise ValueError(f"mesh axis '{name}' is given twice; give it once")
        if not size.isascii() or not size.isdigit() or int(size) < 1:
            raise ValueError(f"mesh axis '{name}' has size '{size}'; give a number from 1 on")
        axes[name] = int(size)
    return axes


def make_mesh(
    axes: Mapping[str, int], devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
    """A mesh with the named axes and sizes, for example `{"data": 2, "tensor": 4}`.

    Axes are put in the order of `AXES`, and devices in one that suits it and how they are wired
    (`jax.make_mesh`), so that the innermost axis has the shortest ways. Where `devices` is None
    and one process has more than are needed, the first ones serve.

    Raises:
      ValueError: for an unknown axis, or where the sizes do not multiply to the number of devices.
    """
    unknown = [name for name in axes if name not in AXES]
    if unknown:
        raise ValueError(f"a mesh has no axis '{unknown[0]}'; use {', '.join(AXES)}")
    needed = math.prod(axes.values())
    if devices is None:
        devices = jax.devices()
        if jax.process_count() == 1:
            devices = devices[:needed]
    if needed != len(devices):
        sizes = ",".join(f"{name}:{size}" for name, size in axes.items())
        raise ValueError(f"a mesh of {sizes} takes {needed} devices; there are {len(devices)}")
    ordered = {name: axes[name] for name in AXES if name in axes} or {"data": 1}
    auto = (jax.sharding.AxisType.Auto,) * len(ordered)
    return jax.make_mesh(tuple(ordered.values()), tuple(ordered), auto, devices=devices)
