"""Accelerators to compile for, none of which need be there: the real compilers' own answers.

The extras `tpu-compile` and `gpu-compile` hold the compilers. Where one is missing, tests fail with
what to install.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stoker.engine.compiling.targets import find_target, prepare_process
from stoker.models.errors import StokerError

TPUS = ("v5e", "v5p", "v6e")
TARGETS = (*TPUS, "h200")


def platform_of(target: str) -> str:
    """What JAX calls the platform of a target: "tpu" or "gpu"."""
    return "tpu" if target in TPUS else "gpu"


@functools.cache
def mesh_of(target: str) -> Mesh:
    """One device of the target; the test fails where its compiler is not installed."""
    prepare_process()
    try:
        devices = find_target(target).devices
    except StokerError as error:
        pytest.fail(str(error), pytrace=False)
    return Mesh(np.array(devices[:1]), ("x",))


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
    target: str,
    function: Callable[..., Any],
    *args: Any,
    donate: Sequence[int] = (),
    options: dict[str, Any] | None = None,
) -> Compiled:
    """`function` compiled for one device of the target and the shapes of `args`, with `options`."""
    mesh = mesh_of(target)
    whole = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), args
    )
    with jax.set_mesh(mesh):
        jitted = jax.jit(function, donate_argnums=tuple(donate), out_shardings=whole)
        program = jitted.lower(*shapes).compile(compiler_options=options)
    memory: Any = program.memory_analysis()
    return Compiled(memory.alias_size_in_bytes, memory.temp_size_in_bytes, program.as_text() or "")
