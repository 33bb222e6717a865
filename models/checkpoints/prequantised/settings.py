"""What `quantization_config` says, with every key accounted for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import StokerError
from ...families.hf_config import ConfigJson

_WHERE = "config.json: quantization_config"


class Settings(ConfigJson):
    """Typed look-ups in `quantization_config`, or in an object inside it."""

    def __init__(self, values: Any, where: str = _WHERE) -> None:
        if not isinstance(values, Mapping):
            raise StokerError(f"{where} is {values!r:.40}, not an object; download it again")
        super().__init__(values, where)

    def inner(self, key: str, within: str | None = None) -> Settings:
        """The object under a key."""
        return Settings(self.value(key, {}), f"{within or self.where}.{key}")

    def one_of(self, key: str, default: Any, *allowed: Any) -> Any:
        """A value, which must be the default or among `allowed`."""
        value = self.value(key, default)
        if value not in (default, *allowed):
            choices = ", ".join(str(it) for it in dict.fromkeys((default, *allowed)))
            raise StokerError(
                f"{self.where}: '{key}' is {value!r:.40}, which is not supported; give a model "
                f"with {choices}"
            )
        return value

    def names(self, *keys: str) -> list[str]:
        """A list of names under the first of `keys` that is there; none without them."""
        for key in keys:
            values = self.value(key, [])
            if not isinstance(values, list) or not all(isinstance(it, str) for it in values):
                raise StokerError(f"{self.where}: '{key}' must list names, not {values!r:.40}")
            if values:
                return values
        return []

    def check_known(self, method: str, harmless: Iterable[str] = ()) -> None:
        """Raises `StokerError` for a key that nobody asked for and that may change the results."""
        try:
            self.check_rest(method, frozenset(harmless))
        except StokerError as error:
            raise StokerError(str(error).replace("family '", "quant_method '", 1)) from None


def matches(name: str, pattern: str) -> bool:
    """Whether a module's name is `pattern` or, after "re:", begins with what it describes."""
    if not pattern.startswith("re:"):
        return name == pattern
    try:
        return re.match(pattern.removeprefix("re:"), name) is not None
    except re.error as error:
        raise StokerError(
            f"{_WHERE}: '{pattern:.60}' is no regular expression ({error}); download it again"
        ) from None


def refuse_spared(module: str, spared: Iterable[str]) -> None:
    """Raises `StokerError` where a quantised module is among those that must not be."""
    for pattern in spared:
        if matches(module, pattern):
            raise StokerError(
                f"{_WHERE} spares '{pattern:.60}' but the tensors of '{module}' are quantised; "
                "download the model again"
            )
