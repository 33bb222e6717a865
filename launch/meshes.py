"""`--mesh` and `--mesh_rules`: the devices that a model is split over."""

from __future__ import annotations

import jax
from absl import flags

from ..models.errors import StokerError
from ..models.loading import Model
from ..models.placing.placement import placement_report
from ..sharding import Rules, make_mesh, parse_mesh, parse_rules


def define_mesh_flags(values: flags.FlagValues) -> None:
    """The flags that `given_mesh` reads."""
    flags.DEFINE_string(
        "mesh",
        "",
        "Devices to split the model over, by axis: data (copies of it, with slots of their own), "
        "sequence (parts of each context), expert and tensor (parts of its matrices); for example "
        "data:2,tensor:4. By default one device.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "mesh_rules",
        "",
        "Which mesh axes split which parts of the model, where the usual ones do not suit: "
        "vocab=,ff=expert+tensor|tensor.",
        flag_values=values,
    )


def given_mesh(values: flags.FlagValues) -> tuple[jax.sharding.Mesh | None, Rules | None]:
    """The mesh and the rules that the flags name; no mesh where they name none.

    Raises:
      StokerError: they cannot be read, or there are not so many devices.
    """
    try:
        axes, rules = parse_mesh(values.mesh), parse_rules(values.mesh_rules)
        mesh = make_mesh(axes) if axes else None
    except ValueError as error:
        name = "mesh_rules" if "rule" in str(error) else "mesh"
        raise StokerError(f"--{name}={values[name].value}: {error}") from None
    if rules and mesh is None:
        raise StokerError("--mesh_rules are for a mesh; give --mesh too")
    return mesh, rules or None


def mesh_lines(model: Model) -> list[str]:
    """What people are told of a model's mesh: its axes, and what did not divide."""
    if model.mesh is None:
        return []
    return [str(model.config.split), *placement_report(model.config)]


def devices_at_once(model: Model) -> int:
    """Devices whose memories a step of one copy of the model reads at the same time.

    Devices that a CPU host pretends to be share its memory, and count as one.
    """
    if model.mesh is None or jax.default_backend() == "cpu":
        return 1
    return model.mesh.size // model.config.split.degree("slots")
