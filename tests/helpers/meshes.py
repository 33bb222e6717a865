"""The pure steps on meshes of forced host devices, against one device; in a process of its own."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
from driving import chunk, decoding, new_state, page_table

from stoker.engine import steps
from stoker.engine.cache import new_cache
from stoker.engine.on_mesh import on_mesh
from stoker.engine.sampling_params import SamplingParams
from stoker.models.config import ModelConfig
from stoker.models.parameters import Params
from stoker.models.placement import place_params, split_config
from stoker.sharding import make_mesh, parse_mesh

PROMPTS = [[1, 2, 3], list(range(40, 91))]
PAGES = 4


def mesh_of(text: str) -> jax.sharding.Mesh:
    return make_mesh(parse_mesh(text))


def repeated(batch, parts: int):
    """A batch for each part of the data axis, one after another."""
    return jax.tree.map(lambda array: np.concatenate([np.asarray(array)] * parts), batch)


@functools.lru_cache(maxsize=2)
def _alone(step, config: ModelConfig):
    return jax.jit(functools.partial(step, config=config))


def expected(config: ModelConfig, params: Params) -> list[np.ndarray]:
    """Logits `[2, V]` after two prompts of one step, and after a forced token of each."""
    table = page_table(2, PAGES)
    batch = chunk(PROMPTS, [0, 0], table, 64)
    cache, first = _alone(steps.prefill_logits, config)(params, new_cache(config, 16), batch)
    state, active = _forced(config), decoding([True, True], table)
    _, second = _alone(steps.decode_logits, config)(params, cache, state, active)
    return [np.asarray(first), np.asarray(second)]


def found(config: ModelConfig, params: Params, text: str) -> list[np.ndarray]:
    """The same on a mesh, from each part of its data axis: `[parts, 2, V]`."""
    mesh = mesh_of(text)
    split = split_config(config, mesh)
    parts, share = split.split.degree("pages"), split.split.degree("context")
    placed = place_params(params, split, mesh)
    table = page_table(2, -(-PAGES // share))
    batch = repeated(chunk(PROMPTS, [0, 0], table, 64), parts)
    prefill = jax.jit(on_mesh(steps.prefill_logits, split, mesh), donate_argnums=1)
    decode = jax.jit(on_mesh(steps.decode_logits, split, mesh), donate_argnums=1)
    cache, first = prefill(placed, new_cache(split, 16, mesh=mesh), batch)
    state, active = _forced(config), decoding([True, True], table)
    _, second = decode(placed, cache, repeated(state, parts), repeated(active, parts))
    shape = (parts, 2, -1)
    logits = (np.asarray(x).reshape(shape)[:, :, : config.vocab_size] for x in (first, second))
    return list(logits)


def _forced(config: ModelConfig) -> steps.State:
    state = new_state([SamplingParams()] * 2)
    lengths = np.array([len(prompt) for prompt in PROMPTS], np.int32)
    return dataclasses.replace(state, tokens=np.array([5, 6], np.int32), lengths=lengths)


def compare(config: ModelConfig, params: Params, meshes: list[str], atol: float = 1e-4) -> None:
    """Raises AssertionError unless logits on each mesh equal those of one device."""
    wanted = expected(config, params)
    for text in meshes:
        for got, want in zip(found(config, params, text), wanted, strict=True):
            for part in got:
                np.testing.assert_allclose(part, want, atol=atol, err_msg=f"{config} on {text}")
