"""What a family of models is, as data: names, fixed traits, and the few keys of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..config import LayerKind
from .gguf_config import Keys
from .hf_config import ConfigJson
from .naming import Naming, gguf_naming, hf_naming

#: Fields of `ModelConfig`, by name.
Fields = Mapping[str, Any]


def nothing_more(source: ConfigJson | Keys, fields: Fields) -> Fields:
    """For families whose configuration holds nothing of their own."""
    return {}


def turned_locally(kinds: tuple[LayerKind, ...], local: Sequence[bool]) -> tuple[LayerKind, ...]:
    """`kinds` with the local rotary embedding on the layers that `local` says."""
    return tuple(
        dataclasses.replace(kind, rope="local") if is_local else kind
        for kind, is_local in zip(kinds, local, strict=True)
    )


@dataclasses.dataclass(frozen=True)
class Family:
    """Models that one description loads, from Hugging Face's files and from GGUF.

    Attributes:
      name: the family's own name, `ModelConfig.family`.
      model_types: what `config.json` calls it, `model_type`.
      architecture: what GGUF files call it, the prefix of their keys; empty: there are none.
      traits: fields of `ModelConfig` that all its models share.
      hf: names in Hugging Face's files.
      gguf: names in GGUF files.
      from_json: further fields from a `config.json`, given those that all families share.
      from_keys: likewise from the metadata of a GGUF file.
    """

    name: str
    model_types: tuple[str, ...] = ()
    architecture: str = ""
    traits: Fields = dataclasses.field(default_factory=dict)
    hf: Naming = dataclasses.field(default_factory=hf_naming)
    gguf: Naming = dataclasses.field(default_factory=gguf_naming)
    from_json: Callable[[ConfigJson, Fields], Fields] = nothing_more
    from_keys: Callable[[Keys, Fields], Fields] = nothing_more
