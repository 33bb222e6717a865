"""Real weights for the tests that need them; fetched once, through Stoker's own alias."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Iterator

import pytest

from stoker.engine.compiling.targets import prepare_process
from stoker.models.errors import StokerError
from stoker.models.loading import Model, load_model
from stoker.models.sources import resolve


def pytest_configure(config: pytest.Config) -> None:
    """Before any module asks JAX for devices, which would keep the compilers from loading."""
    if any(name in config.option.markexpr for name in ("compile", "contract")):
        prepare_process()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what needs an accelerator's compiler, unless -m asks for it by name."""
    wanted = config.option.markexpr
    asked = [marker for marker in ("compile", "contract") if marker not in wanted]
    spared = [item for item in items if any(map(item.get_closest_marker, asked))]
    if spared:
        config.hook.pytest_deselected(items=spared)
        items[:] = [item for item in items if item not in spared]


@pytest.fixture(scope="session")
def smollm2_path() -> pathlib.Path:
    """The GGUF file of SmolLM2-135M-Instruct (98 MB); a failed download fails the test."""
    try:
        return resolve("smollm2-135m")
    except StokerError as error:
        pytest.fail(f"these tests need SmolLM2-135M: {error}", pytrace=False)


@pytest.fixture(scope="session")
def smollm2(smollm2_path: pathlib.Path) -> Model:
    """SmolLM2-135M-Instruct, loaded."""
    return load_model(smollm2_path)


@pytest.fixture
def many_switches() -> Iterator[None]:
    """Python turns from thread to thread as often as it can."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.fixture
def helpers_on_path() -> dict[str, str]:
    """The environment for a subprocess that imports the modules of tests/helpers."""
    return os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parent / "helpers")}
