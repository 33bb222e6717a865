"""What steps compiled for a mesh hold, as JSON; nothing is allocated.

Run as `python -m mesh_programs TOPOLOGY CASE/MESH/STEP ...`, in a process of its own: `host` for
forced host devices, or a slice of TPUs such as `v5e:2x4`, which need not be there. Kernels are the
reference, or follow the step: `prefill+cpu`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from typing import Any

import jax
from compiling import cache_shapes, collectives, compiled, largest_gather
from meshes import case

from stoker.engine.cache import page_bytes
from stoker.engine.programs import cache_copies
from stoker.models.config import ModelConfig, Rope
from stoker.models.placing.placement import shape_params, split_config
from stoker.sharding import make_mesh, parse_mesh

_BFLOAT16 = {"dtype": "bfloat16", "kv_dtype": "bfloat16"}
#: Shapes of published models, by their `config.json`.
LARGE = {
    "llama-3-70b": ModelConfig(
        family="llama",
        vocab_size=128256,
        d_model=8192,
        n_layers=80,
        n_heads=64,
        n_kv_heads=8,
        head_dim=128,
        d_ff=28672,
        max_positions=8192,
        norm_eps=1e-5,
        rope=Rope(500000.0, 128),
        **_BFLOAT16,
    ),
    "mixtral-8x7b": ModelConfig(
        family="mixtral",
        vocab_size=32000,
        d_model=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        head_dim=128,
        d_ff=14336,
        max_positions=32768,
        norm_eps=1e-5,
        rope=Rope(1e6, 128),
        n_experts=8,
        experts_per_token=2,
        **_BFLOAT16,
    ),
}
#: A call of an attention kernel: by its target on a CPU, by its name on a TPU.
_ATTENTION = re.compile(
    r'custom_call_target="stoker_attention"|%stoker_attention\S* = .* custom-call'
)
#: Slots, context, pages and rows of what is compiled.
SMALL_SIZES = {"slots": 4, "context": 128, "pages": 32, "rows": 64}
LARGE_SIZES = {"slots": 16, "context": 4096, "pages": 2048, "rows": 256}


def program(topology: str, job: str) -> dict[str, Any]:
    """Counts and bytes of one program, on each device."""
    name, text, step = job.split("/")
    name, _, layers = name.partition(":")
    axes = parse_mesh(text)
    devices = None
    if topology != "host":
        from jax.experimental import topologies

        description = topologies.get_topology_desc(platform="tpu", topology_name=topology)
        devices = description.devices[: math.prod(axes.values())]
    mesh = make_mesh(axes, devices)
    step, _, kernels = step.partition("+")
    config = LARGE[name] if name in LARGE else case(name, kernels or "xla")
    if layers:
        config = dataclasses.replace(config, n_layers=int(layers))
    config = split_config(config, mesh)
    sizes = LARGE_SIZES if name in LARGE else SMALL_SIZES
    made = compiled(step, config, mesh, **sizes)
    memory: Any = made.memory_analysis()
    pages = cache_shapes(config, mesh, sizes["pages"])
    held = [
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(shape_params(config, mesh))
    ]
    return {
        "collectives": collectives(made),
        "largest_gather": largest_gather(made),
        "copies": cache_copies(made, pages),
        "attention": len(_ATTENTION.findall(made.as_text() or "")),
        "argument_bytes": memory.argument_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "weight_bytes": sum(held),
        "cache_bytes": page_bytes(config) * (sizes["pages"] + 1),
    }


def main(topology: str, jobs: list[str]) -> None:
    print(json.dumps([program(topology, job) for job in jobs]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
