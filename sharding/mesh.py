"""Meshes of devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax


def make_mesh(
    axes: Mapping[str, int], devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
    """A mesh with the named axes and sizes, for example `{"data": 2, "tensor": 4}`.

    Shardings follow from those of the arguments (GSPMD), so every axis is of type `Auto`.

    Raises:
      ValueError: where the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    if math.prod(axes.values()) != len(devices):
        raise ValueError(
            f"a mesh of {dict(axes)} takes {math.prod(axes.values())} devices; there are "
            f"{len(devices)}"
        )
    auto = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), auto, devices=devices)
