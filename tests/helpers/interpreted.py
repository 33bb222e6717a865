"""Kernels as plain JAX on the CPU, compiled quickly rather than well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def run(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, jitted with the compiler's optimisations off."""
    return jitted(function)(*args)


def jitted(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, likewise, to be compiled once for several calls."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})
