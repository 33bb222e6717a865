"""Models named `hf:organisation/name[@revision]`, downloaded by the `huggingface_hub` library.

Its cache, tokens and offline mode are its own; nothing is asked of the network where it forbids.
"""

from __future__ import annotations

import pathlib
import re
from typing import Any

from ..errors import StokerError

PREFIX = "hf:"
#: What a model needs: never pickles, other formats, or weights in a second layout.
PATTERNS = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "*.tiktoken",
)
_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")


def download_snapshot(name: str, **options: Any) -> pathlib.Path:
    """The folder of the model `name`, downloaded where the library's cache lacks it.

    Args:
      name: `hf:organisation/name` or `hf:organisation/name@revision`.
      **options: further arguments of `huggingface_hub.snapshot_download`.

    Raises:
      StokerError: the name is malformed, there is no such model or revision, access is refused, or
        the network, its absence or the disk is in the way.
    """
    match = _NAME.fullmatch(name.removeprefix(PREFIX))
    if match is None:
        raise StokerError(
            f"'{name:.80}' is not a model's name; write {PREFIX}organisation/name, with @revision "
            "after it if need be"
        )
    # Only here: the import takes a while.
    import huggingface_hub
    from huggingface_hub import errors

    repository, revision = match["repository"], match["revision"]
    try:
        folder = pathlib.Path(
            huggingface_hub.snapshot_download(
                repository, revision=revision, allow_patterns=list(PATTERNS), **options
            )
        )
    except Exception as error:
        if not isinstance(error, (OSError, ValueError, errors.HfHubHTTPError)):
            raise
        raise StokerError(f"'{name}' {_reason(error, errors)}") from None
    if not any(folder.glob("model*.safetensors")):
        raise StokerError(
            f"'{name}' holds no safetensors files; give another model, or a GGUF file's path"
        )
    return folder


def _reason(error: Exception, errors: Any) -> str:
    """What to tell a user about an error of the library, without addresses."""
    if isinstance(error, errors.GatedRepoError):
        return "is gated: ask for access on its page, then log in with 'hf auth login'"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "is not there, or is private: check the name, or log in with 'hf auth login'"
    if isinstance(error, errors.RevisionNotFoundError):
        return "has no such revision: give a branch, tag or commit that it has"
    if isinstance(error, errors.HFValidationError):
        return "is not a name that the hub can have: check the spelling"
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        return (
            "is not in the cache, and the hub cannot be asked (offline mode, or no network); "
            "connect and try again, or give the path of a model folder"
        )
    if isinstance(error, errors.HfHubHTTPError):
        status = getattr(getattr(error, "response", None), "status_code", "no answer")
        return f"could not be downloaded (the hub says {status}); try again later"
    detail = getattr(error, "strerror", None) or type(error).__name__
    return f"could not be downloaded ({detail}); check the network and the disk, and try again"
