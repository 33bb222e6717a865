"""Engines that test modules share: compiling one takes seconds."""

from __future__ import annotations

import pytest
from engines import CONTEXT, FEW, MODELS

from stoker.engine.engine import Engine
from stoker.engine.shapes import Shapes
from stoker.models.loading import Model


@pytest.fixture(scope="session", params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]()


@pytest.fixture(scope="session")
def engine(model: Model) -> Engine:
    """32 slots, and steps so small that prompts are cut and mixed with decodes all the time."""
    return Engine(model, slots=32, context=CONTEXT, shapes=FEW)


@pytest.fixture(scope="session")
def alone(model: Model) -> Engine:
    """One slot, whole prompts, nothing shared."""
    shapes = Shapes(decode=(1,), rows=(128,), sequences=(1,), score=64)
    return Engine(model, slots=1, context=CONTEXT, prefix_cache=False, shapes=shapes)
