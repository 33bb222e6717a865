"""Accelerators to compile for, none of which need be there: the real compilers' own answers.

The extras `tpu-compile` and `gpu-compile` hold the compilers. Where one is missing, tests fail with
what to install.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

#: Which topology stands for each TPU.
TPUS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
TARGETS = (*TPUS, "h200")
#: What XLA's GPU compiler asks of a device, for an H200 (132 multiprocessors, 141 GB, 4.8 TB/s).
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4814000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H200"
"""


def platform_of(target: str) -> str:
    """What JAX calls the platform of a target: "tpu" or "gpu"."""
    return "tpu" if target in TPUS else "gpu"


@functools.cache
def mesh_of(target: str) -> Mesh:
    """One device of the target; the test fails where its compiler is not installed."""
    tpu = platform_of(target) == "tpu"
    module = "libtpu" if tpu else "jax_plugins.xla_cuda13"
    if importlib.util.find_spec(module) is None:
        pytest.fail(
            f"compiling for {target} needs {module}: pip install -e '.[{platform_of(target)}"
            "-compile]'",
            pytrace=False,
        )
    if tpu:
        # libtpu looks for the machine's own TPU otherwise.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        # It may compile in several processes at once, since it drives no device.
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        found = topologies.get_topology_desc(platform="tpu", topology_name=TPUS[target])
    else:
        found = topologies.get_topology_desc(
            platform="cuda", topology_name="cuda", topology="1x1x1", target_config=_H200
        )
    return Mesh(np.array(found.devices[:1]), ("x",))


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What a compiler made of a function.

    Attributes:
      aliased: bytes of arguments that results are written over.
      temporary: bytes that a call allocates besides.
      text: the optimised program.
    """

    aliased: int
    temporary: int
    text: str

    def kernels(self, name: str) -> int:
        """Calls of our kernel of that name."""
        return len(re.findall(rf"custom-call\(.*{name}\b", self.text))


def compile_for(
    target: str, function: Callable[..., Any], *args: Any, donate: Sequence[int] = ()
) -> Compiled:
    """`function` compiled for one device of the target and the shapes of `args`."""
    mesh = mesh_of(target)
    whole = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), args
    )
    with jax.set_mesh(mesh):
        jitted = jax.jit(function, donate_argnums=tuple(donate), out_shardings=whole)
        program = jitted.lower(*shapes).compile()
    memory: Any = program.memory_analysis()
    return Compiled(memory.alias_size_in_bytes, memory.temp_size_in_bytes, program.as_text() or "")
