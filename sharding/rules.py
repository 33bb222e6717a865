"""Logical axes to mesh axes, as data."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

#: A mesh axis for each logical axis; a logical axis that is not named is replicated.
Rules = Mapping[str, str]

#: Tensor parallelism (Shoeybi et al. 2019): heads and feed-forward columns split, so that each
#: attention and each MLP block needs one all-reduce.
RULES: Rules = types.MappingProxyType(
    {"vocab": "tensor", "heads": "tensor", "kv_heads": "tensor", "ff": "tensor"}
)


def partition_spec(
    axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh, rules: Rules = RULES
) -> PartitionSpec:
    """The spec of an array of `shape` whose axes have these logical names.

    An axis whose rule names no axis of the mesh, or whose size does not divide by it, is
    replicated.
    """
    entries = []
    for name, size in zip(axes, shape, strict=True):
        target = rules.get(name) if name else None
        fits = target in mesh.shape and size % mesh.shape[target] == 0
        entries.append(target if fits else None)
    return PartitionSpec(*entries)


def sharding(
    axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh, rules: Rules = RULES
) -> NamedSharding:
    """`partition_spec` on its mesh."""
    return NamedSharding(mesh, partition_spec(axes, shape, mesh, rules))
