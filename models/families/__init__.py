"""Model families: what each one's checkpoints call things, as data."""

from __future__ import annotations

import types
from collections.abc import Mapping

from ..errors import StokerError
from .family import Family
from .llama import LLAMA
from .qwen2 import QWEN2

__all__ = ["FAMILIES", "Family", "family_for"]

#: By the architecture that GGUF files state.
FAMILIES: Mapping[str, Family] = types.MappingProxyType(
    {family.architecture: family for family in (LLAMA, QWEN2)}
)


def family_for(architecture: object) -> Family:
    """The family of a GGUF `general.architecture`; `StokerError` names an unknown one."""
    family = FAMILIES.get(architecture) if isinstance(architecture, str) else None
    if family is None:
        raise StokerError(
            f"general.architecture is {architecture!r:.60}, which is not supported; give a model "
            f"of {', '.join(FAMILIES)}"
        )
    return family
