"""Engines on meshes of forced host devices reply what an engine on one device replies."""

from __future__ import annotations

import pytest
from eight_devices import on_eight_devices


@pytest.mark.parametrize(
    ("kind", "meshes"),
    [
        ("plain", ["data:2,tensor:2", "cpu/sequence:4"]),
        ("smollm2", ["tensor:2"]),
        ("experts+int4+cpu", ["data:2,expert:2,tensor:2"]),
    ],
)
def test_whole_engines_give_the_same_replies(
    helpers_on_path: dict[str, str], kind: str, meshes: list[str]
) -> None:
    """Greedy, drawn, penalised and scored; and a prompt too long for one device's pages."""
    assert on_eight_devices(helpers_on_path, "-m", "mesh_engines", kind, *meshes) == "equal\n"


SMOLLM2 = """
import sys
from meshes import mesh_of
from stoker.engine.engine import Engine
from stoker.engine.sampling_params import SamplingParams
from stoker.engine.shapes import Shapes
from stoker.models.loading import load_model
from stoker.models.placing.placement import placement_report

found = []
for text in ("", "tensor:2", "tensor:8"):
    mesh = mesh_of(text) if text else None
    model = load_model(sys.argv[1], activations="float32", kv_dtype="float32", mesh=mesh)
    shapes = Shapes(decode=(2,), rows=(16,), sequences=(2,), score=16)
    engine = Engine(model, slots=2, context=64, shapes=shapes)
    prompts = ["The capital of France is", "Water boils at"]
    replies = engine.generate(prompts, SamplingParams(max_tokens=16), progress=False)
    found.append([reply.text for reply in replies])
assert placement_report(model.config) == (
    "9 query heads on 8 devices: padded to 16, 2 each",
    "3 KV heads on 8 devices: each is on 2 of them",
    "3 KV heads on 8 devices: padded to 4",
), placement_report(model.config)
assert found[0] == found[1] == found[2] and all(found[0]), found
print("equal")
"""


def test_smollm2_writes_the_same_text(helpers_on_path, smollm2_path) -> None:
    """Nine query heads and three KV heads, from a file of 4-bit weights, by the CPU kernels."""
    assert on_eight_devices(helpers_on_path, "-c", SMOLLM2, str(smollm2_path)) == "equal\n"
