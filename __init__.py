"""Stoker: a pure-functional LLM inference engine in JAX that counts the bytes it moves.

The public names below are imported on first use, so that `import stoker` stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import steps
    from .engine.async_engine import AsyncEngine
    from .engine.engine import Engine
    from .engine.sampling_params import SamplingParams
    from .models.errors import StokerError
    from .models.loading import Model, load_model

__all__ = ["AsyncEngine", "Engine", "Model", "SamplingParams", "StokerError", "load_model", "steps"]

_MODULES = {
    "AsyncEngine": ".engine.async_engine",
    "Engine": ".engine.engine",
    "Model": ".models.loading",
    "SamplingParams": ".engine.sampling_params",
    "StokerError": ".models.errors",
    "load_model": ".models.loading",
    "steps": ".engine.steps",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'stoker' has no attribute {name!r}")
    module = importlib.import_module(_MODULES[name], __name__)
    return module if name == "steps" else getattr(module, name)
