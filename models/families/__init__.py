"""Model families: what each one's checkpoints call things, as data."""

from __future__ import annotations

import types
from collections.abc import Mapping

from ..errors import StokerError
from .deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from .family import Family
from .gemma import GEMMA, GEMMA2, GEMMA3
from .gpt_oss import GPT_OSS
from .granite import GRANITE
from .llama import LLAMA
from .mistral import MISTRAL
from .mixtral import MIXTRAL
from .olmo2 import OLMO2
from .olmo3 import OLMO3
from .phi3 import PHI3
from .qwen2 import QWEN2
from .qwen3 import QWEN3
from .qwen3_moe import QWEN3_MOE
from .smollm3 import SMOLLM3

__all__ = ["ALL", "FAMILIES", "Family", "family_for", "family_of_name", "family_of_type"]

ALL: tuple[Family, ...] = (
    *(LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, SMOLLM3),
    *(GEMMA, GEMMA2, GEMMA3, PHI3, OLMO2, OLMO3, GRANITE),
    *(DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS),
)
#: By the architecture that GGUF files state.
FAMILIES: Mapping[str, Family] = types.MappingProxyType(
    {family.architecture: family for family in ALL if family.architecture}
)
#: By the `model_type` of `config.json`.
_TYPES: Mapping[str, Family] = types.MappingProxyType(
    {name: family for family in ALL for name in family.model_types}
)


def family_for(architecture: object) -> Family:
    """The family of a GGUF `general.architecture`; `StokerError` names an unknown one."""
    return _known("general.architecture", architecture, FAMILIES)


def family_of_type(model_type: object) -> Family:
    """The family of a `model_type` in `config.json`; `StokerError` names an unknown one."""
    return _known("model_type", model_type, _TYPES)


def family_of_name(name: object) -> Family:
    """The family of a `ModelConfig.family`; `StokerError` names an unknown one."""
    return _known("the family", name, {family.name: family for family in ALL})


def _known(key: str, name: object, families: Mapping[str, Family]) -> Family:
    family = families.get(name) if isinstance(name, str) else None
    if family is None:
        raise StokerError(
            f"{key} is {name!r:.60}, which is not supported; give a model of {', '.join(families)}"
        )
    return family
