"""The compile contract from shapes alone: the very programs of an engine, whatever devices."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import pytest
from tiny import TINY, random_params, tiny_model

from stoker.engine import programs
from stoker.engine.accounting import step_cost
from stoker.engine.compiling.contract import Setup, StepShape, contract
from stoker.engine.compiling.program_report import StepReport, report_step
from stoker.engine.compiling.targets import Target
from stoker.engine.engine import Engine
from stoker.engine.pages import pages_for
from stoker.engine.programs import device_bytes
from stoker.engine.shapes import Shapes
from stoker.models.config import Kernels
from stoker.models.errors import StokerError
from stoker.models.parameters import count_bytes
from stoker.models.placing.placement import shape_params
from stoker.models.random_weights import WEIGHTS, random_weights

SHAPES = Shapes(decode=(1, 4), rows=(16, 32), sequences=(4,), score=16)
MODEL = dataclasses.replace(TINY, n_layers=2)
CONTEXT = 64


def setup(config=MODEL, weights: str = "float32", slots: int = 4) -> Setup:
    pages = slots * pages_for(CONTEXT, 16)
    return Setup(config, weights, jax.devices(), None, slots, CONTEXT, pages)


def anywhere(lowered: jax.stages.Lowered) -> str:
    """A program without where its arguments lie, which shapes alone must say."""
    text = re.sub(r"sdy\.mesh @empty_mesh.*\n", "", lowered.as_text())
    text = re.sub(
        r"(, )?sdy\.sharding = #sdy\.sharding<@empty_mesh, \[.*?\]>(?=[,}])(, )?", "", text
    )
    return re.sub(r" \{\}|\s+", "", text)


def test_programs_are_those_that_an_engine_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []

    class Noted:
        """A program that is never compiled, since warming up runs none but `admit`."""

        def __init__(self, lowered: jax.stages.Lowered) -> None:
            texts.append(anywhere(lowered))

        def compile(self) -> Noted:
            return self

        def memory_analysis(self) -> None:
            return None

        def __call__(self, state: Any, *_: Any) -> Any:
            return state

    for name in ("lower_step", "lower_admit"):
        lower = getattr(programs, name)
        monkeypatch.setattr(
            programs, name, lambda *args, lower=lower, **rest: Noted(lower(*args, **rest))
        )
    model = tiny_model(MODEL, random_params(MODEL))
    engine = Engine(model, slots=4, context=CONTEXT, shapes=SHAPES, pages=16, decode_steps=2)
    engine.warmup()
    found = [anywhere(setup().lower(shape)) for shape in contract(SHAPES, repeat=2)]
    assert len(found) == 1 + 2 * 2 + 2 + 1
    assert found == texts


def test_names_of_steps() -> None:
    names = [str(shape) for shape in contract(SHAPES, repeat=2)]
    assert names[:3] == ["admit", "decode:1", "decode_steps:1x2"]
    assert names[-3:] == ["prefill:16x4", "prefill:32x4", "score:16"]


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("platform", ["xla", "tpu"])
def test_shapes_of_weights_are_those_of_random_ones(weights: str, platform: str) -> None:
    config = dataclasses.replace(MODEL, kernels=Kernels(platform))
    made = random_weights(config, weights)
    shapes = shape_params(config, None, weights)
    assert jax.tree.structure(made) == jax.tree.structure(shapes)
    for leaf, shape in zip(jax.tree.leaves(made), jax.tree.leaves(shapes), strict=True):
        assert (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype)


def test_what_does_not_divide_into_groups_is_refused() -> None:
    odd = dataclasses.replace(MODEL, d_ff=40)
    with pytest.raises(StokerError, match="groups of 32 columns, and 40 columns"):
        shape_params(odd, None, "int4")


def test_one_device_costs_what_the_whole_step_costs() -> None:
    one = setup(weights="int4")
    params = random_weights(MODEL, "int4")
    wanted = step_cost(MODEL, params, [CONTEXT] * 4)
    assert one.cost(StepShape("decode", 4, 4)) == wanted
    assert one.cost(StepShape("decode_steps", 4, 4, 8)).bytes == 8 * wanted.bytes
    assert device_bytes(one.params()) == count_bytes(params)


def test_the_report_of_a_step_by_the_reference() -> None:
    """It writes every quantised matrix out as floats; the cost model's rules explain its figure."""
    here = Target("here", "cpu", (), 2**30, 1e9, 1e9)
    report = report_step(setup(weights="int4"), StepShape("score", 16, 1), here)
    assert isinstance(report, StepReport)
    assert report.dense_weights >= 7 * MODEL.n_layers + 1
    assert report.cache_aliased and report.cache_copies == 0 and report.fits
    assert report.largest_temporary >= 4 * MODEL.vocab_size * MODEL.d_model
    assert report.surplus is not None and report.compiler_bytes is not None
    assert report.program_bytes + report.surplus.total == pytest.approx(report.compiler_bytes)
    assert abs(report.surplus.other) < 0.01 * report.compiler_bytes
