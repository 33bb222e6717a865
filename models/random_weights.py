"""Random parameters of any weight format: for measuring an architecture without a checkpoint."""

from __future__ import annotations

import dataclasses
import importlib.resources
import tomllib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from .. import configs
from .config import DTYPES, Kernels, LayerKind, ModelConfig, Rope
from .errors import StokerError
from .ops import cpu
from .parameters import Params, abstract_params, init_params, named_parameters, unflatten
from .parts import Latent, Router
from .quantized import E2M1, QuantArray, ready, ready_bytes
from .rotary import yarn_factors

#: Formats of the matrices: dense types, codes in groups of 32 with a float16 scale (int4 with a
#: minimum too, as GGUF's Q4_1 and Q8_0 have them), and four-bit floats, as of GPT-OSS.
WEIGHTS = (*DTYPES, "int8", "int4", "mxfp4")
_GROUP = 32
#: Fields of `ModelConfig` that flags decide, not the architecture.
_RUN_FIELDS = {"dtype", "kv_dtype", "kernels"}


def architectures() -> dict[str, dict[str, Any]]:
    """The architectures of `configs/architectures.toml` by name: fields of `ModelConfig`."""
    text = importlib.resources.files(configs).joinpath("architectures.toml").read_text("utf-8")
    return tomllib.loads(text)


def architecture(name: str) -> ModelConfig:
    """The configuration of an architecture: a name, or a TOML file with the fields of one.

    Raises:
      StokerError: an unknown name, or a file that does not hold such fields.
    """
    known = architectures()
    if name in known:
        return _config(name, known[name])
    if not name.endswith(".toml"):
        raise StokerError(
            f"architecture '{name}' is not known; use {', '.join(known)}, or a .toml file"
        )
    try:
        return _config(name, tomllib.loads(Path(name).read_text("utf-8")))
    except OSError as error:
        raise StokerError(f"cannot read '{name}': {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StokerError(f"'{name}' is not a TOML file: {error}") from None


def _config(name: str, fields: dict[str, Any]) -> ModelConfig:
    known = {field.name for field in dataclasses.fields(ModelConfig)} - _RUN_FIELDS
    wrong = sorted(fields.keys() - known)
    if wrong:
        raise StokerError(f"'{name}' has unknown fields {', '.join(wrong)}")
    try:
        made: dict[str, Any] = {"rope": _rope(fields.get("rope", {}))}
        if "local_rope" in fields:
            made["local_rope"] = _rope(fields["local_rope"])
        for part, kind in (("latent", Latent), ("router", Router)):
            if part in fields:
                made[part] = kind(**fields[part])
        made["kinds"] = tuple(LayerKind(**kind) for kind in fields.get("kinds", ()))
        config = ModelConfig(**(fields | made))
    except (TypeError, ValueError) as error:
        raise StokerError(f"'{name}' is not a whole architecture: {error}") from None
    for field in dataclasses.fields(ModelConfig):
        if field.type == "int" and type(getattr(config, field.name)) is not int:
            value = getattr(config, field.name)
            raise StokerError(f"'{name}': {field.name} is {value!r}; it must be a whole number")
    return config


def _rope(fields: dict[str, Any]) -> Rope:
    """A `Rope` of its fields, where `yarn` may stand for `factors`: the arguments for them."""
    if "yarn" in fields:
        made = yarn_factors(fields["theta"], fields["dims"], **fields["yarn"])
        fields = {key: value for key, value in fields.items() if key != "yarn"} | {"factors": made}
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return Rope(**(fields | lists))


def random_weights(config: ModelConfig, weights: str, seed: int = 0) -> Params:
    """Parameters whose matrices have format `weights` (one of `WEIGHTS`) and random values.

    Quantised ones are packed where `config.kernels` are the CPU's. Norms are ones, biases zeros.
    """
    if weights not in WEIGHTS:
        raise StokerError(f"weights '{weights}' are not known; use {', '.join(WEIGHTS)}")
    if weights in DTYPES:
        return init_params(dataclasses.replace(config, dtype=weights), jax.random.key(seed))
    rng = np.random.default_rng(seed)
    abstract = abstract_params(config)
    values: dict[str, Any] = {}
    for name, parameter in named_parameters(abstract):
        if parameter.dtype != "any":
            fill = jnp.zeros if name.endswith("bias") else jnp.ones
            values[name] = fill(parameter.shape, parameter.dtype)
        else:
            array = _quantised(rng, parameter.shape, weights)
            values[name] = _ready(array, config)
    return unflatten(abstract, jax.tree.map(jnp.asarray, values))


def matrix_shape(shape: tuple[int, ...], weights: str, kernels: Kernels) -> Any:
    """A matrix `[..., R, C]` of `random_weights` as shapes, for kernels that do not pack theirs.

    Raises:
      StokerError: an unknown format, or columns that do not divide into groups.
    """
    if weights not in WEIGHTS:
        raise StokerError(f"weights '{weights}' are not known; use {', '.join(WEIGHTS)}")
    # Shapes stand in for arrays, which types do not know.
    struct: Any = jax.ShapeDtypeStruct
    if weights in DTYPES:
        return struct(shape, weights)
    *lead, C = shape
    if C % _GROUP:
        raise StokerError(
            f"{weights} weights come in groups of {_GROUP} columns, and {C} columns do not divide; "
            "give bfloat16 weights, or another mesh"
        )
    bits = 8 if weights == "int8" else 4
    row_bytes = C * bits // 8
    if kernels.platform == "tpu":
        row_bytes = ready_bytes(row_bytes)
    codes = struct((*lead, row_bytes), jnp.int8 if bits == 8 else jnp.uint8)
    if weights == "mxfp4":
        scale = struct((*lead, C // _GROUP), jnp.float8_e8m0fnu)
        return QuantArray(codes, scale, bits=4, group=_GROUP, levels=E2M1)
    # See `quantized.ready`.
    half = jnp.int16 if kernels.platform == "tpu" else jnp.float16
    scale = struct((*lead, C // _GROUP), half)
    minimum = scale if bits == 4 else None
    return QuantArray(codes, scale, minimum, bits=bits, group=_GROUP)


def _ready(array: QuantArray, config: ModelConfig) -> Any:
    """A quantised matrix as `config.kernels` read it."""
    if config.kernels.platform == "cpu":
        return cpu.pack(array)
    return ready(array) if config.kernels.platform == "tpu" else array


def _quantised(rng: np.random.Generator, shape: tuple[int, ...], weights: str) -> QuantArray:
    """Uniform codes whose values have about the standard deviation of a trained matrix."""
    bits = 8 if weights == "int8" else 4
    *_, C = shape
    if C % _GROUP:
        raise StokerError(f"a row of {C} columns does not divide into groups of {_GROUP}")
    scale: Any
    codes: Any = rng.integers(0, 256, (*shape[:-1], C * bits // 8), np.uint8)
    if weights == "mxfp4":
        exponent = round(127 - np.log2(3 * C**0.5))
        powers: Any = np.full((*shape[:-1], C // _GROUP), exponent, np.uint8)
        scale = powers.view(ml_dtypes.float8_e8m0fnu)
        return QuantArray(codes, scale, bits=4, group=_GROUP, levels=E2M1)
    step = C**-0.5 / 2 ** (bits - 2)
    scale = np.full((*shape[:-1], C // _GROUP), step, np.float16)
    if bits == 8:
        return QuantArray(codes.view(np.int8), scale, bits=8, group=_GROUP)
    return QuantArray(codes, scale, (-7.5 * scale).astype(np.float16), bits=4, group=_GROUP)
