"""ORB-01, ORB-03: saved on one mesh, restored on others; what does not fit is refused by path."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from gguf_files import Tiny, write_gguf
from tiny import random_params, variant

from stoker.models.checkpoints.converting import convert_model
from stoker.models.checkpoints.orbax import restore_params, save_params
from stoker.models.errors import StokerError
from stoker.models.loading import load_model
from stoker.models.quantise import Quantisation, quantise

MESHES = """
import dataclasses, sys
import jax, numpy as np
from tiny import variant
from stoker.models.checkpoints.orbax import restore_params, save_params
from stoker.models.parameters import init_params
from stoker.models.placing.placement import place_params, split_config
from stoker.models.quantise import Quantisation, quantise
from stoker.sharding import make_mesh

# Parts of rows are whole groups. On eight devices each of the four KV heads is on two.
sizes = {"n_layers": 12, "n_kv_heads": 4, "d_ff": 256, "head_dim": 32}
config = dataclasses.replace(variant("plain"), **sizes)
params = init_params(config, jax.random.key(0))
quantised = {
    name: quantise(np.asarray(leaf), Quantisation(4)) if leaf.ndim > 1 else leaf
    for name, leaf in params["layers"][11].items()
}
params = params | {"layers": (*params["layers"][:11], quantised)}
saving = make_mesh({"tensor": 4}, jax.devices()[:4])
placed = place_params(params, split_config(config, saving), saving)
save_params(sys.argv[1], placed, config)
meshes = [None] + [
    make_mesh(axes, jax.devices()[:count])
    for axes, count in (({"tensor": 2, "data": 2}, 4), ({"data": 4}, 4), ({"tensor": 8}, 8))
]
for mesh in meshes:
    restored = restore_params(sys.argv[1], config, mesh=mesh)
    wanted = params if mesh is None else place_params(params, split_config(config, mesh), mesh)
    assert jax.tree.structure(restored) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        assert mesh is None or a.sharding == b.sharding, (a.sharding, b.sharding)
        np.testing.assert_array_equal(a, b)
    assert len(restored["layers"][11]["gate"].codes.sharding.device_set) == (
        1 if mesh is None else mesh.size
    )
print("equal")
"""


def test_saved_on_one_mesh_restored_on_four_others(helpers_on_path, tmp_path) -> None:
    environment = helpers_on_path | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    run = subprocess.run(
        [sys.executable, "-c", MESHES, str(tmp_path / "saved")],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.stdout == "equal\n", run.stderr


CONFIG = variant("plain")


@pytest.fixture(scope="module")
def params():
    params = random_params(CONFIG)
    layers = [dict(layer) for layer in params["layers"]]
    layers[1]["up"] = quantise(np.asarray(layers[1]["up"]), Quantisation(8))
    return params | {"layers": tuple(layers)}


@pytest.fixture(scope="module")
def saved(params, tmp_path_factory):
    folder = tmp_path_factory.mktemp("orbax") / "saved"
    save_params(folder, params, CONFIG)
    return folder


def test_restored_is_what_was_saved(saved, params):
    restored = restore_params(saved, CONFIG)
    assert jax.tree.structure(restored) == jax.tree.structure(params)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_twelve_layers_keep_their_order(tmp_path):
    """ORB-03: as text, 10 would come before 2."""
    config = dataclasses.replace(CONFIG, n_layers=12)
    params = random_params(config)
    layers = tuple(
        dict(layer) | {"attn_norm": jnp.full_like(layer["attn_norm"], number)}
        for number, layer in enumerate(params["layers"])
    )
    save_params(tmp_path / "saved", params | {"layers": layers}, config)
    restored = restore_params(tmp_path / "saved", config)
    assert [float(layer["attn_norm"][0]) for layer in restored["layers"]] == list(range(12))


def rewritten(saved, folder, change):
    """The same manifest beside a tree that `change` has edited, as Orbax alone would write it."""
    folder.mkdir()
    (folder / "stoker.json").write_text((saved / "stoker.json").read_text())
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    with ocp.Checkpointer(handler) as checkpointer:
        tree = checkpointer.restore(saved / "orbax")
        change(tree)
        checkpointer.save(folder / "orbax", tree)
    return folder


def set_leaf(*keys):
    def change(tree, make):
        node = tree
        for key in keys[:-1]:
            node = node[key]
        node[keys[-1]] = make(node[keys[-1]])

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tree: tree["layers"]["0"].pop("k"),
            "lacks the array 'layers.0.k'",
        ),
        (lambda tree: tree.update(novel=np.ones(3)), "the array 'novel'"),
        (
            lambda tree: set_leaf("layers", "1", "q")(tree, lambda leaf: np.asarray(leaf)[:-1]),
            r"'layers.1.q' of the checkpoint has the shape \[63, 64\]",
        ),
        (
            lambda tree: set_leaf("layers", "1", "down")(tree, lambda leaf: np.asarray(leaf).T),
            r"'layers.1.down' of the checkpoint has the shape \[160, 64\], its transpose",
        ),
        (
            lambda tree: set_leaf("final_norm")(tree, lambda leaf: np.asarray(leaf, np.float16)),
            "'final_norm' of the checkpoint is float16",
        ),
        (
            lambda tree: set_leaf("layers", "1", "up", "codes")(
                tree, lambda leaf: np.asarray(leaf, np.int32)
            ),
            "'layers.1.up.codes' of the checkpoint is int32",
        ),
    ],
)
def test_a_tree_that_does_not_fit_is_refused_by_path(saved, tmp_path, change, message):
    folder = rewritten(saved, tmp_path / "edited", change)
    with pytest.raises(StokerError, match=message):
        restore_params(folder, CONFIG)


def test_another_configuration_is_refused_by_path(saved):
    with pytest.raises(StokerError, match=r"lacks the parameter 'layers.0.k_bias'"):
        restore_params(saved, dataclasses.replace(CONFIG, attention_bias=True))
    with pytest.raises(StokerError, match=r"'layers.0.down' of the checkpoint has the shape"):
        restore_params(saved, dataclasses.replace(CONFIG, d_ff=96))


def test_parameters_that_do_not_fit_are_not_saved(params, tmp_path):
    transposed = params | {"head": params["head"].T}
    with pytest.raises(StokerError, match=r"'head' of the checkpoint .* its transpose"):
        save_params(tmp_path / "out", transposed, CONFIG)
    assert not (tmp_path / "out").exists()


def test_a_damaged_tree_is_one_sentence(saved, tmp_path):
    folder = tmp_path / "damaged"
    folder.mkdir()
    (folder / "stoker.json").write_text((saved / "stoker.json").read_text())
    with pytest.raises(StokerError, match="cannot be read as an Orbax checkpoint"):
        restore_params(folder, CONFIG)


@pytest.mark.parametrize("kernels", ["xla", "cpu"])
def test_converted_models_load_like_their_source(tmp_path, kernels):
    source = write_gguf(tmp_path / "m.gguf", Tiny(n_layers=12), quantisation="Q4_1")
    done = convert_model(source, tmp_path / "out", to="orbax")
    assert json.loads((done.path / "stoker.json").read_text())["storage"] == "orbax"
    one, other = load_model(source, kernels=kernels), load_model(done.path, kernels=kernels)
    assert jax.tree.structure(one.params) == jax.tree.structure(other.params)
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_array_equal(a, b)
    assert one.tokenizer.encode("some text") == other.tokenizer.encode("some text")


def test_without_the_library_the_extra_is_named(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(StokerError, match=r"pip install 'stoker\[orbax\]'"):
        restore_params(saved, CONFIG)
