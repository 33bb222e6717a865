"""What devices tell each other in a compiled step: counted, for forced host devices and for TPUs.

Those of TPUs (marker `compile`) are compiled by `libtpu` itself, for machines that need not be
there: `pip install -e '.[tpu-compile]'`, and `pytest -m compile`.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

LAYERS = 2
#: Where `libtpu` is asked of machines that are not there, it must not look for this one's, nor mind
#: another process that does the same.
TPU_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def programs(helpers_on_path: dict[str, str], topology: str, *jobs: str) -> list[dict[str, Any]]:
    # Without the optimisations that cost more than they save here: collectives stay the same.
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    environment = helpers_on_path | TPU_ENVIRONMENT | {"XLA_FLAGS": flags}
    if topology != "host" and importlib.util.find_spec("libtpu") is None:
        pytest.fail(
            "compiling for TPUs needs the package libtpu; pip install -e '.[tpu-compile]'",
            pytrace=False,
        )
    command = [sys.executable, "-m", "mesh_programs", topology, *jobs]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def expected(mesh: str, layers: int, *, full_norms: bool = False) -> dict[str, int]:
    """Two sums a layer and one for the embedding, one exchange of logits, one for tokens.

    Where devices share a context: rows out, peaks, sums back in each layer, and rows at the end.
    """
    counts = {"all-reduce": 0, "all-gather": 0, "all-to-all": 0, "reduce-scatter": 0}
    if "tensor" in mesh or "expert" in mesh:
        counts["all-reduce"] += 1 + (3 if full_norms else 2) * layers
        counts["all-to-all"] += 1
        counts["all-gather"] += 1
    if "sequence" in mesh:
        counts["all-gather"] += layers + 1
        counts["all-reduce"] += layers
        counts["reduce-scatter"] += layers
    return {name: count for name, count in counts.items() if count}


def check(found: dict[str, Any], mesh: str, *, full_norms: bool = False, layers: int = 2) -> None:
    assert found["collectives"] == expected(mesh, layers, full_norms=full_norms)
    # Rows of a step at most: no matrix, no page and no logits are gathered.
    assert found["largest_gather"] < 2**14
    assert found["copies"] == []
    assert found["aliased_bytes"] >= found["cache_bytes"]


HOST = {
    "plain": (
        "tensor:8/decode",
        "data:2,tensor:2/prefill",
        "data:8/decode",
        "sequence:2,tensor:2/prefill+cpu",
    ),
    "experts": ("expert:4/prefill", "expert:2,tensor:2/decode"),
    "six_heads": ("tensor:2/decode",),
    "latent": ("sequence:2,tensor:2/decode",),
}


@pytest.mark.parametrize("name", HOST)
def test_steps_hold_exactly_the_collectives_that_they_need(
    helpers_on_path: dict[str, str], name: str
) -> None:
    jobs = [f"{name}/{job}" for job in HOST[name]]
    for job, found in zip(jobs, programs(helpers_on_path, "host", *jobs), strict=True):
        check(found, job.split("/")[1], full_norms=name == "six_heads")
        assert found["attention"] == (LAYERS if job.endswith("+cpu") else 0)


@pytest.mark.compile
@pytest.mark.parametrize("name", ["plain", "experts"])
def test_programs_for_tpus_hold_no_others(helpers_on_path: dict[str, str], name: str) -> None:
    meshes = ("tensor:8", "data:2,expert:2,tensor:2", "sequence:2,tensor:4")
    jobs = [f"{name}/{mesh}/{step}" for mesh in meshes for step in ("decode", "prefill")]
    if name == "plain":
        jobs.append("plain/sequence:4/prefill+tpu")
    for job, found in zip(jobs, programs(helpers_on_path, "v5e:2x4", *jobs), strict=True):
        mesh = job.split("/")[1]
        wanted = expected(mesh, LAYERS)
        # This compiler sums and scatters in a fusion around an all-reduce.
        wanted["all-reduce"] += wanted.pop("reduce-scatter", 0)
        if "data" in mesh:
            # It takes this slice for two hosts: what each part found, five arrays of a number or
            # four for each sequence, goes to the process that plans.
            wanted["all-reduce"] += 3
            wanted["all-gather"] += 2
        assert found["collectives"] == wanted, job
        assert found["attention"] == (LAYERS if job.endswith("+tpu") else 0), job
        assert found["largest_gather"] < 2**14
        assert found["aliased_bytes"] >= found["cache_bytes"]


#: Bytes of all weights in bfloat16, but for norms: from the shapes, by hand.
_LLAMA_LAYER = 2 * (8192 * (8192 + 1024 + 1024 + 8192) + 3 * 8192 * 28672)
_MIXTRAL_LAYER = 2 * (4096 * (4096 + 1024 + 1024 + 4096) + 8 * 3 * 4096 * 14336)


@pytest.mark.compile
@pytest.mark.parametrize(
    ("job", "layer_bytes", "table_bytes", "repeated"),
    [
        ("llama-3-70b:4/tensor:16/decode", _LLAMA_LAYER, 2 * 8192 * 128256, 2 * 8192 * 2048),
        ("mixtral-8x7b:4/expert:8,tensor:2/decode", _MIXTRAL_LAYER, 2 * 4096 * 32000, 0),
    ],
)
def test_memory_of_each_device_by_the_compiler(
    helpers_on_path: dict[str, str], job: str, layer_bytes: int, table_bytes: int, repeated: int
) -> None:
    """Sixteen v5e devices: each holds a sixteenth of the weights, and of the KV heads' copies."""
    (found,) = programs(helpers_on_path, "v5e:4x4", job)
    layers = int(job.partition(":")[2].partition("/")[0])
    share = ((layer_bytes + repeated) * layers + 2 * table_bytes) / 16
    assert found["weight_bytes"] == pytest.approx(share, rel=0.01)
    # One of eight KV heads, which two devices hold each.
    kv = 2049 * 16 * 2 * 128 * 2 * layers
    assert found["cache_bytes"] == kv
    assert found["aliased_bytes"] >= kv and found["copies"] == []
    rest = found["argument_bytes"] - found["weight_bytes"] - kv
    assert 0 <= rest < 8e6, "state and batch"
    assert found["temporary_bytes"] < 0.1 * found["weight_bytes"]
    mesh = job.split("/")[1]
    assert found["collectives"] == expected(mesh, layers)
