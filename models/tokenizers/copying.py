"""Keeps a model's tokenizer beside weights in another format."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import gguf

from ..errors import StokerError

#: What says something of a tokenizer in a model folder, as patterns.
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "*.tiktoken",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)


def copy_tokenizer_files(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copies what says something of the tokenizer from a model folder to the folder `target`."""
    for pattern in FILES:
        for file in sorted(source.glob(pattern)):
            copy = target / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)


def write_vocabulary(metadata: Mapping[str, Any], path: pathlib.Path) -> None:
    """Writes a GGUF file without tensors: the `tokenizer.*` keys of `metadata`, as they are.

    Raises:
      StokerError: a key is of a type that such files do not have.
    """
    writer = gguf.GGUFWriter(path, str(metadata.get("general.architecture", "")))
    for key, value in metadata.items():
        if not key.startswith("tokenizer."):
            continue
        try:
            kinds = [gguf.GGUFValueType.get_type(value)]
            if isinstance(value, list):
                if not value:
                    # The format has no type for the items of an empty list.
                    continue
                kinds.append(_item_type(value))
        except (ValueError, TypeError):
            raise StokerError(
                f"{key} cannot be kept in a GGUF file; convert the model again"
            ) from None
        writer.add_key_value(key, value, *kinds)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def _item_type(values: list[Any]) -> gguf.GGUFValueType:
    # A list of whole and broken numbers is one of broken ones.
    value = next((value for value in values if isinstance(value, float)), values[0])
    return gguf.GGUFValueType.get_type(value)
