"""`--mesh` and `--mesh_rules`: what they name, and what they refuse."""

from __future__ import annotations

import jax
import pytest
from absl import flags
from tiny import random_params, tiny_model, variant

from stoker.launch.meshes import define_mesh_flags, devices_at_once, given_mesh, mesh_lines
from stoker.models.errors import StokerError
from stoker.models.placing.placed_model import place_model
from stoker.models.random_weights import random_weights
from stoker.sharding import make_mesh


def given(*arguments: str) -> flags.FlagValues:
    values = flags.FlagValues()
    define_mesh_flags(values)
    values(["stoker", *arguments])
    return values


def test_no_flag_is_no_mesh() -> None:
    assert given_mesh(given()) == (None, None)


def test_a_mesh_and_its_rules() -> None:
    mesh, rules = given_mesh(given("--mesh=tensor:1", "--mesh_rules=vocab="))
    assert mesh is not None and dict(mesh.shape) == {"tensor": 1}
    assert rules == {"vocab": ()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh=rows:2"], "--mesh=rows:2: a mesh has no axis 'rows'"),
        (["--mesh=tensor:64"], "--mesh=tensor:64: a mesh of tensor:64 takes 64 devices; there"),
        (["--mesh=tensor:1", "--mesh_rules=rows=data"], "--mesh_rules=rows=data: no rule is for"),
        (["--mesh_rules=vocab="], "give --mesh too"),
    ],
)
def test_what_cannot_be_had_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(StokerError, match=message):
        given_mesh(given(*arguments))


def test_a_mesh_is_reported() -> None:
    config = variant("plain")
    model = tiny_model(config, random_params(config))
    assert mesh_lines(model) == [] and devices_at_once(model) == 1
    placed = place_model(model, make_mesh({"tensor": 1}, jax.devices()[:1]))
    assert mesh_lines(placed) == ["tensor:1"]


def test_whole_packed_weights_are_refused() -> None:
    config = variant("plain", "cpu")
    model = tiny_model(config, random_weights(config, "int4"))
    with pytest.raises(StokerError, match="cannot be split over a mesh"):
        place_model(model, make_mesh({"tensor": 1}, jax.devices()[:1]))
