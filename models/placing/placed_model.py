"""A model of one device, moved onto a mesh."""

from __future__ import annotations

import dataclasses

import jax

from ...sharding import Rules
from ..loading import Model
from .placement import place_params, split_config


def place_model(model: Model, mesh: jax.sharding.Mesh, rules: Rules | None = None) -> Model:
    """A model of one device, whose weights are not packed, on the devices of `mesh`.

    `rules` take the place of those of `sharding.RULES` for the logical axes they name. To load a
    model straight onto the mesh, without ever holding all of it, give the mesh to `load_model`.

    Raises:
      StokerError: the rules contradict each other, or weights are packed.
    """
    config = split_config(model.config, mesh, rules)
    params = place_params(model.params, config, mesh)
    return dataclasses.replace(model, config=config, params=params, mesh=mesh)
