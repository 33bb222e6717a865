"""The pure steps on a mesh: each device runs them on its part, and tells others what they need."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from ..models.config import ModelConfig
from ..models.ops.cpu import PackedArray
from ..models.pages import layer_pages
from ..models.parameters import Params, abstract_params, is_weight
from . import steps

#: A step with everything bound but its arrays.
Arrays = Callable[..., Any]
#: What each step returns besides the cache: rows of slots (`state`), of sequences or tokens
#: (`rows`; `later`, behind an axis of steps), or logits over tokens of the vocabulary.
_RESULTS = {
    "prefill": ("state", "rows"),
    "decode": ("state", "rows"),
    "decode_steps": ("state", "later"),
    "score": ("state", "rows"),
    "prefill_logits": ("logits",),
    "decode_logits": ("logits",),
}


def param_specs(params: Params, config: ModelConfig) -> Params:
    """The partition of each array of `params`, from the abstract tree."""
    leaves, structure = jax.tree.flatten(params, is_leaf=is_weight)
    specs = []
    for parameter, value in zip(jax.tree.leaves(abstract_params(config)), leaves, strict=True):
        spec = config.split.spec(parameter.axes)
        if isinstance(value, PackedArray):
            spec = PartitionSpec(*spec, None)
        specs.append(jax.tree.map(lambda _, spec=spec: spec, value))
    return jax.tree.unflatten(structure, specs)


def cache_specs(config: ModelConfig) -> tuple[tuple[PartitionSpec, ...], ...]:
    """The partition of each buffer of the cache."""
    layer = tuple(config.split.spec(pages.axes) for pages in layer_pages(config, 1))
    return (layer,) * config.n_layers


def slot_spec(config: ModelConfig) -> PartitionSpec:
    """The partition of arrays whose first axis is slots, sequences or rows of a step.

    Each part of the `data` axis has slots of its own, numbered from 0: arrays of the parts follow
    each other, `query_start` and page numbers included.
    """
    return config.split.spec(("slots",))


def results(step: Callable[..., Any], config: ModelConfig) -> tuple[Any, ...]:
    """The partition of what `step` returns: the cache, and what follows it."""
    rows = slot_spec(config)
    logits = PartitionSpec(*rows, *config.split.spec(("vocab",)))
    kinds = {"state": rows, "rows": rows, "later": PartitionSpec(None, *rows), "logits": logits}
    return (cache_specs(config), *(kinds[kind] for kind in _RESULTS[step.__name__]))


def on_mesh(step: Callable[..., Any], config: ModelConfig, mesh: Mesh, **static: Any) -> Arrays:
    """`step` of `engine/steps.py` as a function of arrays over the whole of `mesh`.

    Usable under `jit` and `lax.scan`, like the step itself. Parameters come from
    `models.placement`, the cache from `new_cache`, and everything else is as for one device, once
    for each part of the `data` axis (`slot_spec`). Logits are `[B, V]` with padding after the
    vocabulary.

    Args:
      step: the function itself, or one that wraps it and bears its name.
      config: of the model, with its `split`.
      mesh: the one that `split` was made for.
      static: what else the step takes by name.
    """
    rows, cache = slot_spec(config), cache_specs(config)
    bound = functools.partial(step, config=config, **static)

    def run(params: Params, pages: Any, *rest: Any) -> Any:
        specs = (param_specs(params, config), cache, *(rows for _ in rest))
        split = jax.shard_map(
            bound, mesh=mesh, in_specs=specs, out_specs=results(step, config), check_vma=False
        )
        return split(params, pages, *rest)

    return run


def admit_on_mesh(config: ModelConfig, mesh: Mesh) -> Arrays:
    """`steps.admit` where the state's slots are split; slot numbers run over all parts."""
    rows = slot_spec(config)
    axes = config.split.axes("slots")

    def run(state: steps.State, slot: jax.Array, row: steps.State) -> steps.State:
        own = state.tokens.shape[0]
        # One past the end is nobody's: negative numbers would count from the end.
        local = slot - (jax.lax.axis_index(axes) * own if axes else 0)
        local = jax.numpy.where((local < 0) | (local >= own), own, local)
        return jax.tree.map(lambda whole, new: whole.at[local].set(new, mode="drop"), state, row)

    nowhere = PartitionSpec()
    return jax.shard_map(
        run, mesh=mesh, in_specs=(rows, nowhere, nowhere), out_specs=rows, check_vma=False
    )
