"""Rules, and the steps on a mesh of forced host devices against one device."""

from __future__ import annotations

import subprocess
import sys

import jax
import pytest
from jax.sharding import PartitionSpec
from tiny import variant

from stoker.models.errors import StokerError
from stoker.models.parameters import place_params
from stoker.models.random_weights import random_weights
from stoker.sharding import make_mesh, partition_spec

ON_FOUR_DEVICES = """
import jax, numpy as np
from driving import chunk, decoding, new_state, page_table
from tiny import TINY, random_params, variant
from stoker.engine import steps
from stoker.engine.cache import new_cache
from stoker.engine.programs import Programs
from stoker.engine.sampling_params import SamplingParams
from stoker.models.parameters import abstract_params, place_params
from stoker.sharding import make_mesh

assert jax.device_count() == 4
for name in ("plain", "tied", "one_kv_head", "odd_sizes"):
    config = variant(name)
    params = random_params(config)
    table = page_table(2, 4)
    batch = chunk([[1, 2, 3], list(range(20))], [0, 0], table)

    def run(params, cache):
        state = new_state([SamplingParams()] * 2)
        cache, logits = steps.prefill_logits(params, cache, batch, config=config)
        cache, state, _ = steps.prefill(params, cache, state, batch, config=config)
        decode = decoding([True, True], table)
        return logits, steps.decode_logits(params, cache, state, decode, config=config)[1]

    expected = jax.jit(run)(params, new_cache(config, 8))
    mesh = make_mesh({"data": 1, "tensor": 4})
    placed = place_params(params, config, mesh)
    spec = placed["layers"][0]["gate"].sharding.spec
    assert spec == jax.P("tensor", None), spec
    state = new_state([SamplingParams()] * 2)
    Programs(config).prepare(steps.prefill, placed, new_cache(config, 8, mesh=mesh), state, batch)
    got = jax.jit(run)(placed, new_cache(config, 8, mesh=mesh))
    for a, b in zip(got, expected):
        np.testing.assert_allclose(a, b, atol=1e-4)
print("equal")
"""


def test_steps_on_a_mesh_equal_one_device(helpers_on_path: dict[str, str]) -> None:
    environment = helpers_on_path | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    run = subprocess.run(
        [sys.executable, "-c", ON_FOUR_DEVICES], env=environment, capture_output=True, text=True
    )
    assert run.stdout == "equal\n", run.stderr


def test_what_does_not_divide_is_replicated() -> None:
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "tensor"))
    assert partition_spec(("ff", "model"), (160, 64), mesh) == PartitionSpec("tensor", None)
    assert partition_spec(("kv_heads", None), (6, 3), mesh) == PartitionSpec(None, None)
    assert partition_spec(("model", "ff"), (64, 160), mesh) == PartitionSpec(None, "tensor")


def test_a_mesh_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="takes 8 devices; there are 1"):
        make_mesh({"tensor": 8}, jax.devices()[:1])


def test_packed_weights_are_refused_by_a_mesh() -> None:
    config = variant("plain", "cpu")
    params = random_weights(config, "int4")
    with pytest.raises(StokerError, match="load the model with kernels='xla'"):
        place_params(params, config, make_mesh({"tensor": 1}))
