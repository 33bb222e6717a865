"""The tokenizer of a checkpoint in Stoker's own format."""

from __future__ import annotations

import pathlib

from ..checkpoints.gguf_header import read_header
from ..checkpoints.manifest import TOKENIZER, VOCABULARY
from .base import Tokenizer
from .folder import tokenizer_from_folder
from .gguf import tokenizer_from_gguf


def tokenizer_from_native(folder: pathlib.Path) -> Tokenizer:
    """Builds the tokenizer from the files that `stoker convert` kept, in `folder`/tokenizer.

    Raises `StokerError` as `tokenizer_from_folder` and `tokenizer_from_gguf`.
    """
    vocabulary = folder / TOKENIZER / VOCABULARY
    if vocabulary.is_file():
        return tokenizer_from_gguf(read_header(vocabulary).metadata)
    return tokenizer_from_folder(folder / TOKENIZER)
