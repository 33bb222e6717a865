"""Whole engines on meshes of forced host devices, against one device.

Run as `python -m mesh_engines MODEL MESH ...`, in a process of its own; `cpu/MESH` is one with the
CPU kernels. Prints "equal".
"""

from __future__ import annotations

import dataclasses
import sys

import jax
import numpy as np
from engines import GREEDY, PENALISED, SEEDED
from meshes import case, mesh_of
from tiny import random_params, tiny_model

from stoker.engine.engine import Engine
from stoker.engine.replies import Reply
from stoker.engine.shapes import Shapes
from stoker.models.loading import Model
from stoker.models.ops import choices
from stoker.models.placing.placed_model import place_model
from stoker.models.random_weights import random_weights

SHAPES = Shapes(decode=(4,), rows=(32,), sequences=(4,), score=32)
LENGTHS = (5, 40, 70, 33, 12)


def replies(model: Model, **options) -> list[Reply]:
    """To prompts of several lengths, chosen in every way; the second one's prompt is scored."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, model.config.vocab_size, n).tolist() for n in LENGTHS]
    ways = [GREEDY, dataclasses.replace(SEEDED, prompt_logprobs=2), PENALISED, GREEDY, SEEDED]
    ways = [dataclasses.replace(way, max_tokens=12) for way in ways]
    engine = Engine(model, slots=4, context=128, shapes=SHAPES, **options)
    engine.warmup()
    found = engine.generate(prompts, ways, progress=False)
    assert engine.runner.programs.late == 0
    for pages in engine.all_pages:
        assert pages.used == 0
    return found


def same(found: list[Reply], expected: list[Reply]) -> None:
    """The same tokens, and log-probabilities within rounding."""
    for reply, wanted in zip(found, expected, strict=True):
        assert reply.error is None and reply.ids == wanted.ids, (reply, wanted)
        np.testing.assert_allclose(reply.choices[0].logprobs, wanted.choices[0].logprobs, atol=1e-4)
    scored = (np.array(replies[1].prompt_logprobs[1:]) for replies in (found, expected))
    np.testing.assert_allclose(*scored, atol=1e-4)


def long_prompt(model: Model, shared: Model) -> None:
    """A prompt of 200 tokens where each of the devices of `shared` has pages for 64."""
    prompt = np.random.default_rng(6).integers(0, 512, 200).tolist()
    shapes = Shapes(decode=(1,), rows=(32,), sequences=(1,), score=32)
    ids = []
    for placed, pages in ((model, 14), (shared, 4)):
        engine = Engine(placed, slots=1, context=224, pages=pages, shapes=shapes)
        ids.append(engine.generate([prompt], GREEDY, progress=False)[0].ids)
        for leaf in jax.tree.leaves(engine.runner.device.cache):
            held = leaf.addressable_shards[0].data.size * len(leaf.addressable_shards)
            assert held == leaf.size
    assert ids[0] == ids[1] and len(ids[0]) == GREEDY.max_tokens


def main(kind: str, meshes: list[str]) -> None:
    name, weights, kernels = (*kind.split("+"), "", "")[:3]
    plain = case(name)
    model = tiny_model(plain, random_weights(plain, weights) if weights else random_params(plain))
    expected = replies(model)
    for job in meshes:
        own, _, text = job.rpartition("/")
        config = case(name, own or kernels or "xla")
        placed = place_model(dataclasses.replace(model, config=config), mesh_of(text))
        assert choices(placed.config)["attention"].implementation == config.kernels.platform
        same(replies(placed), expected)
        if text == "sequence:4":
            long_prompt(model, placed)
    print("equal")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
