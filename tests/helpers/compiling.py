"""Steps compiled for a mesh from shapes alone, and what the compiled programs hold."""

from __future__ import annotations

import collections
import math
import re

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from stoker.engine import steps
from stoker.engine.cache import new_cache
from stoker.engine.on_mesh import cache_specs, slot_spec
from stoker.engine.pages import pages_for
from stoker.engine.programs import lower_step
from stoker.engine.sampling_params import SamplingParams
from stoker.models.config import ModelConfig
from stoker.models.placing.placement import shape_params

_OPERATION = re.compile(
    r"= (?P<result>\(?[a-z]+\d*\[.*?) "
    r"(?P<name>all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(-start)?\("
)
_ARRAY = re.compile(r"[a-z]+\d+\[([\d,]*)\]")


def compiled(
    step: str,
    config: ModelConfig,
    mesh: Mesh,
    *,
    slots: int,
    context: int,
    pages: int,
    rows: int = 0,
    dtype: str = "bfloat16",
) -> jax.stages.Compiled:
    """`step` of `engine/steps.py`, where `config` is split over `mesh`; nothing is allocated.

    Args:
      step: "decode" of all slots, or "prefill" of `rows` rows.
      config: of the model, with its `split`.
      mesh: devices that need not be there.
      slots: of each part of the data axis.
      context: tokens of the longest sequence.
      pages: of each part of the data axis.
      rows: of a prefill step.
      dtype: of the weights.
    """
    split = config.split
    parts = split.degree("slots")

    def of_slots(tree):
        """The shapes of all parts' arrays, from those of one."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                (leaf.shape[0] * parts, *leaf.shape[1:]),
                leaf.dtype,
                sharding=NamedSharding(mesh, slot_spec(config)),
            ),
            tree,
        )

    cache = cache_shapes(config, mesh, pages)
    requests = [SamplingParams(seed=0)] * slots
    state = of_slots(jax.eval_shape(lambda: steps.new_state(requests, config.vocab_size, context)))
    table = np.zeros((slots, pages_for(context, 16 * split.degree("context"))), np.int32)
    numbers = np.zeros(slots, np.int32)
    if step == "decode":
        batch = of_slots(steps.DecodeBatch(table, numbers, numbers))
    else:
        starts = np.zeros(slots + 1, np.int32)
        batch = steps.PrefillBatch(
            np.zeros(rows, np.int32), starts, numbers, table, numbers, np.zeros(slots, bool)
        )
        batch = of_slots(batch)
    arguments = (shape_params(config, mesh, dtype), cache, state, batch)
    return lower_step(getattr(steps, step), config, *arguments, mesh=mesh, top=4).compile()


def cache_shapes(config: ModelConfig, mesh: Mesh, pages: int):
    """The cache of each data part's `pages`, on `mesh`."""
    return jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
        ),
        jax.eval_shape(lambda: new_cache(config, pages)),
        cache_specs(config),
    )


def collectives(program: jax.stages.Compiled) -> dict[str, int]:
    """How often each kind of collective occurs in a program."""
    found = (match["name"] for match in _OPERATION.finditer(program.as_text() or ""))
    return dict(collections.Counter(found))


def largest_gather(program: jax.stages.Compiled) -> int:
    """Elements of the largest array that an all-gather makes."""
    sizes = [0]
    for match in _OPERATION.finditer(program.as_text() or ""):
        if match["name"] == "all-gather":
            for shape in _ARRAY.findall(match["result"]):
                sizes.append(math.prod(map(int, filter(None, shape.split(",")))))
    return max(sizes)
