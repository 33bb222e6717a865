"""A `ModelConfig` as JSON and back, checked field by field."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any

from ..config import ModelConfig
from ..errors import StokerError

#: Fields that a run decides, not a checkpoint.
RUN_FIELDS = frozenset({"dtype", "kv_dtype", "kernels", "split"})


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """The architecture as an object of plain values, without what a run decides."""
    return {
        field.name: _plain(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.name not in RUN_FIELDS
    }


def config_from_json(values: object) -> ModelConfig:
    """The architecture of such an object, in float32 and with the reference kernels.

    Raises:
      StokerError: a field is missing, unknown or of the wrong type; its name is in the message.
    """
    if isinstance(values, dict):
        for name in RUN_FIELDS & values.keys():
            raise StokerError(f"config.{name} is not for a checkpoint to say; convert it again")
    config = _value(ModelConfig, values, "config")
    assert isinstance(config, ModelConfig)
    return config


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: _plain(getattr(value, field.name)) for field in fields}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


@functools.cache
def _types(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _value(kind: Any, value: Any, where: str) -> Any:
    """`value` as the annotation `kind` has it: a dataclass, a tuple of one type, or a scalar."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _dataclass(kind, value, where)
    arguments = typing.get_args(kind)
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return None if value is None else _value(inner, value, where)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise _wrong(where, value, "a list")
        return tuple(
            _value(arguments[0], item, f"{where}[{place}]") for place, item in enumerate(value)
        )
    if kind is float and type(value) is int:
        return float(value)
    # Not isinstance: a bool must not pass for an int.
    if type(value) is not kind:
        raise _wrong(where, value, f"of type {kind.__name__}")
    return value


def _dataclass(kind: type, values: Any, where: str) -> Any:
    if not isinstance(values, dict):
        raise _wrong(where, values, "an object")
    known = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(values.keys() - known.keys())
    if unknown:
        raise StokerError(
            f"{where} has the field '{unknown[0]:.60}', which this version of Stoker does not "
            "know; update Stoker"
        )
    for name, field in known.items():
        required = field.default is dataclasses.MISSING
        if required and field.default_factory is dataclasses.MISSING and name not in values:
            raise StokerError(f"{where} lacks the field '{name}'; convert the model again")
    hints = _types(kind)
    return kind(**{name: _value(hints[name], values[name], f"{where}.{name}") for name in values})


def _wrong(where: str, value: Any, wanted: str) -> StokerError:
    return StokerError(f"{where} is {value!r:.60}, which is not {wanted}; convert the model again")
