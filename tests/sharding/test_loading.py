"""Checkpoints read onto a mesh, part by part: the same arrays as a whole model put there."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from gguf_models import write_gguf_model
from hf_models import make, write
from running import CASES

from stoker.models.checkpoints.narrowing import narrowed
from stoker.models.families.naming import TensorUse
from stoker.models.parameters import Parameter
from stoker.models.placing.placement import _readings

SCRIPT = """
import sys
import jax, numpy as np
from host_job import held_bytes, load_counting
from meshes import mesh_of
from stoker.models.loading import load_model
from stoker.models.placing.placed_model import place_model

for path in sys.argv[2:]:
    whole = load_model(path, kernels="xla")
    for text in sys.argv[1].split("/"):
        mesh = mesh_of(text)
        wanted, (found, read) = place_model(whole, mesh), load_counting(path, mesh, kernels="xla")
        # Two parameters of DeepSeek 2 take turns with the rows of a tensor, which both read.
        assert read <= held_bytes(found.params) * (1.2 if "deepseek-v2" in path else 1), path
        assert found.config == wanted.config and found.mesh == mesh
        assert jax.tree.structure(found.params) == jax.tree.structure(wanted.params)
        for a, b in zip(*map(jax.tree.leaves, (found.params, wanted.params)), strict=True):
            assert a.sharding == b.sharding and a.dtype == b.dtype, (path, a.sharding, b.sharding)
            np.testing.assert_array_equal(a, b, err_msg=path)
        layer = found.params["layers"][0]
        one = jax.tree.leaves(layer["q_b"] if "q_b" in layer else layer["q"])[0]
        assert one.addressable_shards[0].data.shape[0] < one.shape[0]
print("equal")
"""
#: Rows as they are, permuted ones, rows of a fused tensor, experts of their own and shared tensors,
#: and matrices of heads.
FOLDERS = ("llama", "phi3", "mixtral", "gpt-oss", "deepseek-v2")
FILES = ("llama-heads", "phi3", "qwen3-moe", "deepseek-v3")


@pytest.mark.reference
@pytest.mark.parametrize("kind", ["folders", "files"])
def test_parts_read_are_parts_of_the_whole(helpers_on_path, tmp_path, kind: str) -> None:
    paths = []
    for name in FOLDERS if kind == "folders" else FILES:
        model = make(CASES[name])
        if kind == "folders":
            paths.append(write(model, tmp_path / name))
        else:
            paths.append(tmp_path / f"{name}.gguf")
            write_gguf_model(model, paths[-1], "Q4_0" if name == "llama-heads" else "F32")
    flags = "--xla_force_host_platform_device_count=8"
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, "tensor:4/data:2,expert:2,tensor:2", *map(str, paths)],
        env=helpers_on_path | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert run.stdout == "equal\n", run.stderr


def test_columns_are_read_once_and_no_others() -> None:
    """Of a matrix [8, 200] in blocks of 32: neighbours that share one, and padding alone."""

    def read(*spans: tuple[int, int]) -> dict:
        boxes = [((0, 8), span) for span in spans]
        return {
            wanted[1]: [box[1] for box in held] for wanted, held in _readings(boxes, (8, 200), 32)
        }

    assert read((64, 128)) == {(64, 128): [(64, 128)]}
    assert read((0, 64), (64, 128), (64, 128)) == {(0, 64): [(0, 64)], (64, 128): [(64, 128)]}
    assert read((0, 48), (48, 96)) == {(0, 96): [(0, 48), (48, 96)]}
    assert read((160, 200)) == {(160, 200): [(160, 200)]}
    assert read((200, 200)) == {(192, 200): [(200, 200)]}
    assert list(_readings([((8, 8), (0, 64))], (8, 200), 32)) == [
        (((0, 1), (0, 64)), [((8, 8), (0, 64))])
    ]


def test_rows_of_one_tensor() -> None:
    use = TensorUse(("t",), (30, 4), slice(10, 22))
    parameter = Parameter((12, 4), ("ff", None))
    own, found, order = narrowed((use, parameter, None), (slice(3, 6), slice(2, 4)))
    assert own.rows == slice(13, 16, 1) and own.columns == slice(2, 4)
    assert found.shape == (3, 2) and order is None


def test_rows_in_another_order_are_read_where_they_lie() -> None:
    order = np.array([1, 0, 3, 2, 5, 4, 7, 6])
    use = TensorUse(("t",), (8, 4), slice(None))
    source = (use, Parameter((8, 4), ("heads", None)), order)
    own, _, rest = narrowed(source, (slice(4, 8),))
    assert own.rows == slice(4, 8, 1) and rest is not None and rest.tolist() == [1, 0, 3, 2]


def test_experts_of_their_own_tensors() -> None:
    use = TensorUse(tuple("abcd"), (6, 4), slice(2, 6))
    source = (use, Parameter((4, 4, 4), ("experts", "ff", None)), None)
    own, parameter, _ = narrowed(source, (slice(1, 3), slice(1, 4), slice(0, 2)))
    assert own.tensors == ("b", "c") and own.rows == slice(3, 6, 1)
    assert own.columns == slice(0, 2) and parameter.shape == (2, 3, 2)


def test_experts_of_one_tensor() -> None:
    """Outputs of two parameters take turns in it; where it holds one, all are of that."""
    use = TensorUse(("t",), (4, 12, 8), slice(0, 4), outputs=slice(1, 12, 2))
    parameter = Parameter((4, 6, 8), ("experts", "ff", None))
    own, found, _ = narrowed((use, parameter, None), (slice(1, 3), slice(2, 4)))
    assert (own.rows, own.outputs) == (slice(1, 3), slice(5, 9, 2)) and found.shape == (2, 2, 8)
    down = TensorUse(("t",), (4, 8, 6), slice(0, 4))
    parameter = Parameter((4, 8, 6), ("experts", None, "ff"))
    own, _, _ = narrowed((down, parameter, None), (slice(0, 4), slice(0, 8), slice(3, 6)))
    assert (own.outputs, own.columns) == (slice(0, 8, 1), slice(3, 6))
    bias = TensorUse(("t",), (4, 12), slice(0, 4), outputs=slice(1, 12, 2))
    parameter = Parameter((4, 6), ("experts", "ff"))
    own, _, _ = narrowed((bias, parameter, None), (slice(0, 4), slice(2, 4)))
    assert (own.outputs, own.columns) == (slice(5, 9, 2), None)


def test_rows_of_heads() -> None:
    use = TensorUse(("t",), (24, 4), slice(None), heads=4)
    parameter = Parameter((4, 6, 4), ("heads", None, None))
    own, found, _ = narrowed((use, parameter, None), (slice(2, 3), slice(0, 6), slice(0, 4)))
    assert own.rows == slice(12, 18, 1) and own.heads == 1 and found.shape == (1, 6, 4)
