"""The small text files of a model folder."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from .errors import StokerError

#: Bytes of one such file: a tokenizer of 260,000 tokens takes 35 MB.
LIMIT = 256 << 20


def read_text(path: pathlib.Path) -> str:
    """The UTF-8 text of a file.

    Raises `StokerError` where it cannot be read, is larger than `LIMIT`, or is not UTF-8.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(LIMIT + 1)
    except OSError as error:
        raise StokerError(
            f"'{path}' cannot be read ({error.strerror or error}); give a whole model folder"
        ) from None
    if len(data) > LIMIT:
        raise StokerError(f"'{path}' has more than {LIMIT} bytes; download it again")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise StokerError(
            f"'{path}' is not UTF-8 text (byte {error.start} cannot be decoded); download it again"
        ) from None


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file; `StokerError` as `read_text`, or where it holds something else."""
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise StokerError(f"'{path}' is not JSON ({error!s:.80}); download it again") from None
    if not isinstance(value, dict):
        raise StokerError(f"'{path}' holds no JSON object; download it again")
    return value
