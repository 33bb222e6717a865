"""The pure steps on meshes of forced host devices, against one device.

Run as `python -m meshes CASE/MESH/MESH ...`, in a process of its own, for example
`experts+int4+cpu/tensor:2/expert:4`: a case of `CASES`, the format of its weights and who does the
arithmetic (float32 and xla unless named). Prints "equal".
"""

from __future__ import annotations

import dataclasses
import functools
import sys

import jax
import numpy as np
from driving import chunk, decoding, new_state, page_table
from tiny import KERNELS, TINY, random_params

from stoker.engine import steps
from stoker.engine.cache import new_cache
from stoker.engine.on_mesh import on_mesh
from stoker.engine.sampling_params import SamplingParams
from stoker.models.config import Kernels, LayerKind, ModelConfig
from stoker.models.parameters import Params
from stoker.models.parts import Latent
from stoker.models.placing.placement import place_params, split_config
from stoker.models.random_weights import random_weights
from stoker.sharding import make_mesh, parse_mesh

PROMPTS = [[1, 2, 3], list(range(40, 91))]
PAGES = 4


def mesh_of(text: str) -> jax.sharding.Mesh:
    return make_mesh(parse_mesh(text))


def repeated(batch, parts: int):
    """A batch for each part of the data axis, one after another."""
    return jax.tree.map(lambda array: np.concatenate([np.asarray(array)] * parts), batch)


#: Without the optimisations that cost more than they save here.
_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
_LATENT = {"kv_rank": 32, "rope_dim": 8, "nope_dim": 8, "v_dim": 16, "q_rank": 24}
_EXPERTS = {"n_experts": 6, "experts_per_token": 2, "d_ff": 64}
#: What a mesh may meet, each on top of `TINY`: heads, widths and vocabularies that do not divide,
#: and every kind of layer.
CASES = {
    "plain": {},
    "smollm2": {"n_heads": 9, "n_kv_heads": 3, "d_ff": 96, "vocab_size": 509, "tied_head": True},
    "groups": {"n_heads": 12, "n_kv_heads": 3, "qk_norm": "head", "attention_bias": True},
    "one_kv_head": {"n_heads": 6, "n_kv_heads": 1, "mlp_bias": True, "output_bias": True},
    "six_heads": {"n_heads": 6, "n_kv_heads": 2, "qk_norm": "full", "post_norm": True},
    "window": {"kinds": (LayerKind(window=16), LayerKind()), "attention_sinks": True},
    "experts": {**_EXPERTS, "mlp_bias": True, "router_bias": True},
    "shared_expert": {**_EXPERTS, "shared_d_ff": 40, "dense_layers": 1, "dense_d_ff": 72},
    "latent": {"latent": Latent(**_LATENT), "n_kv_heads": 1, "head_dim": 16},
}


def case(name: str, kernels: str = "xla") -> ModelConfig:
    chosen = KERNELS.get(kernels) or Kernels(kernels)
    return dataclasses.replace(TINY, kernels=chosen, **CASES[name])


@functools.lru_cache(maxsize=2)
def _alone(step, config: ModelConfig):
    return _jit(functools.partial(step, config=config))


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
    prefill = _jit(on_mesh(steps.prefill_logits, split, mesh), donate_argnums=1)
    decode = _jit(on_mesh(steps.decode_logits, split, mesh), donate_argnums=1)
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
    """Raises AssertionError unless logits on each mesh equal the reference's on one device.

    `params` are not packed.
    """
    wanted = expected(dataclasses.replace(config, kernels=KERNELS["xla"]), params)
    for text in meshes:
        for got, want in zip(found(config, params, text), wanted, strict=True):
            for part in got:
                np.testing.assert_allclose(part, want, atol=atol, err_msg=f"{config} on {text}")


def main(jobs: list[str]) -> None:
    for job in jobs:
        kind, *meshes = job.split("/")
        name, weights, kernels = (*kind.split("+"), "", "")[:3]
        plain = case(name)
        params = random_weights(plain, weights) if weights else random_params(plain)
        compare(case(name, kernels or "xla"), params, meshes)
    print("equal")


if __name__ == "__main__":
    main(sys.argv[1:])
