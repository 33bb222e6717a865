"""One of several processes that run one model, as a program of its own would.

Run as `python -m host_job COORDINATOR COUNT INDEX MODEL MESH`. Process 0 prints its replies' tokens
as JSON, what `stoker score --json` does, and then a line for each token of a long reply; the others
what they read of the file.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import jax
import pytest
from absl import flags
from mesh_engines import replies
from meshes import mesh_of

from stoker.engine.engine import Engine
from stoker.engine.hosts import dismiss, facts_of, follow
from stoker.engine.sampling_params import SamplingParams
from stoker.engine.shapes import Shapes
from stoker.launch import score as scoring
from stoker.models.checkpoints.gguf import GGUFCheckpoint
from stoker.models.checkpoints.safetensors import SafetensorsCheckpoint
from stoker.models.loading import Model, load_model
from stoker.models.parameters import Params
from stoker.sharding import join

NUMERICS = {"dtype": "float32", "kv_dtype": "float32", "kernels": "xla"}
ENDLESS = SamplingParams(max_tokens=8000, ignore_eos=True)


def tokens(model: Model) -> list[list[int]]:
    return [reply.ids for reply in replies(model)]


def score(model: Model) -> None:
    """Prints what `stoker score` makes of a few tokens, in a file beside the model's."""
    values = flags.FlagValues()
    scoring.COMMAND.define_flags(values)
    ids = model.path.with_suffix(".json")
    values(["score", f"--ids_file={ids}", "--json", "--context=64"])
    scoring.COMMAND.run(values, lambda: model)


def load_counting(path: str, mesh: jax.sharding.Mesh, **numerics: str) -> tuple[Model, int]:
    """The model, and how many bytes of its tensors were read."""
    read = []
    with pytest.MonkeyPatch.context() as patch:
        for checkpoint in (GGUFCheckpoint, SafetensorsCheckpoint):

            def counted(self, name, *index, load=checkpoint.load):
                value = load(self, name, *index)
                read.append(sum(leaf.nbytes for leaf in jax.tree.leaves(value)))
                return value

            patch.setattr(checkpoint, "load", counted)
        return load_model(path, **numerics, mesh=mesh), sum(read)


def held_bytes(params: Params) -> int:
    """Bytes of the parts of parameters that this process's devices hold, each counted once."""
    parts = [
        {str(shard.index): shard.data.nbytes for shard in leaf.addressable_shards}
        for leaf in jax.tree.leaves(params)
    ]
    return sum(sum(part.values()) for part in parts)


def main(coordinator: str, count: str, index: str, path: str, mesh: str) -> None:
    team = join(coordinator, int(count), int(index), timeout_s=120)
    model, read = load_counting(path, mesh_of(mesh), **NUMERICS)
    team.agree(facts_of(model))
    if not team.hosts.leads:
        print("read", read, held_bytes(model.params), flush=True)
        follow(model, team)
    else:
        model = dataclasses.replace(model, team=team)
        print(json.dumps(tokens(model)), flush=True)
        score(model)
        sys.stdout.flush()
        shapes = Shapes(decode=(1,), rows=(16,), sequences=(1,), score=16)
        engine = Engine(model, slots=1, context=8192, pages=512, shapes=shapes)
        for _ in engine.stream([1, 2, 3], ENDLESS):
            print("token", flush=True)
        dismiss(team)
    team.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
