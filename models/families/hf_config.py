"""A `ModelConfig` from the `config.json` of Hugging Face."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from ..config import LayerKind, ModelConfig, Rope, plain_kinds
from ..errors import StokerError
from ..rotary import llama3_factors, longrope_attention_factor, yarn_attention_factor, yarn_factors

if TYPE_CHECKING:
    from .family import Family

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
#: Keys that every configuration may have and that change no logits: names, training, sampling,
#: special tokens (read elsewhere), and biases, which the tensors decide.
_HARMLESS_KEYS = """
architectures attention_bias attention_dropout auto_map bad_words_ids begin_suppress_tokens
bos_token_id cache_implementation chunk_size_feed_forward decoder_start_token_id diversity_penalty
do_sample dtype early_stopping embd_pdrop encoder_no_repeat_ngram_size eos_token_id
exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
hidden_dropout id2label initializer_range is_llama_config label2id length_penalty max_length
max_new_tokens min_length mlp_bias mlp_dropout model_type no_repeat_ngram_size num_beam_groups
num_beams num_return_sequences output_attentions output_hidden_states output_scores pad_token_id
prefix pretraining_tp problem_type remove_invalid_values repetition_penalty resid_pdrop
return_dict return_dict_in_generate router_aux_loss_coef sep_token_id suppress_tokens
task_specific_params temperature tf_legacy_loss tie_word_embeddings tokenizer_class top_k top_p
torch_dtype torchscript transformers.js_config transformers_version typical_p unsloth_fixed
use_bfloat16 use_cache vocab_size
"""
_HARMLESS = frozenset(_HARMLESS_KEYS.split())
#: Values of unknown keys that turn something off.
_OFF: tuple[Any, ...] = (None, False, "", [], {})
#: Layer types of `layer_types`, and whether they slide.
_LAYER_TYPES = {"full_attention": False, "sliding_attention": True}


class ConfigJson:
    """Typed look-ups in a `config.json`, which remember what was asked for. Null counts as absent.

    Args:
      values: the object.
      where: how errors call it, for example `config.json`.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self.values, self.where = values, where
        self._asked: set[str] = set()

    def value(self, key: str, default: Any = None) -> Any:
        """The value of a key; without a default, its absence is an error."""
        self._asked.add(key)
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise StokerError(f"{self.where} has no '{key}'; give a whole configuration")
        return value

    def has(self, key: str) -> bool:
        """Whether a key is there with a value."""
        self._asked.add(key)
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number of 0 or more."""
        value = self.value(key, default)
        if type(value) is not int or value < 0:
            raise StokerError(f"{self.where}: '{key}' must be a whole number, not {value!r:.40}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.value(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise StokerError(f"{self.where}: '{key}' must be a number, not {value!r:.40}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.value(key, default)
        if type(value) is not bool:
            raise StokerError(f"{self.where}: '{key}' must be true or false, not {value!r:.40}")
        return value

    def items(self, key: str, length: int, exact: bool = False) -> list[Any]:
        """A list of at least, or `exact`ly, `length` values; that many of them."""
        value = self.value(key)
        if not isinstance(value, list) or len(value) < length or (exact and len(value) > length):
            raise StokerError(f"{self.where}: '{key}' must list {length} values, not {value!r:.40}")
        return value[:length]

    def unsupported(self, key: str) -> NoReturn:
        """Raises `StokerError` for the value of a key."""
        raise StokerError(
            f"{self.where}: '{key}' is {self.values.get(key)!r:.40}, which is not supported; give "
            "a model without it"
        )

    def check_rest(self, family: str, harmless: Collection[str] = _HARMLESS) -> None:
        """Raises `StokerError` for a key that nobody asked for and that may change the results."""
        for key, value in self.values.items():
            known = key in self._asked or key in harmless or key.startswith("_")
            if known or key.endswith("_version") or value in _OFF:
                continue
            raise StokerError(
                f"{self.where}: family '{family}' does not know '{key}' ({value!r:.40}), which may "
                "change the results; remove the key if it does not, or give another model"
            )


def model_config(family: Family, json: ConfigJson, tensors: Collection[str]) -> ModelConfig:
    """The architecture that `json` describes.

    Args:
      family: of the model.
      json: the configuration; every key that may change the results must be known.
      tensors: names in the checkpoint, which decide on biases and on the output head.

    Raises:
      StokerError: naming the key that is missing, wrong or unknown.
    """
    layers = json.integer("num_hidden_layers")
    if layers > len(tensors):
        raise StokerError(
            f"{json.where}: num_hidden_layers is {layers} but the files hold only {len(tensors)} "
            "tensors; download the model again"
        )
    heads, d_model = json.integer("num_attention_heads"), json.integer("hidden_size")
    if heads < 1:
        raise StokerError(f"{json.where}: num_attention_heads must be at least 1")
    head_dim = json.integer("head_dim", d_model // heads)
    positions = json.integer("max_position_embeddings")
    fields: dict[str, Any] = {
        "family": family.name,
        "vocab_size": json.integer("vocab_size"),
        "d_model": d_model,
        "n_layers": layers,
        "n_heads": heads,
        "n_kv_heads": json.integer("num_key_value_heads", heads),
        "head_dim": head_dim,
        "d_ff": json.integer("intermediate_size"),
        "max_positions": positions,
        "norm_eps": json.number("rms_norm_eps", 1e-6),
        **family.hf.presence(tensors, layers),
    }
    # Who says that biases or an own head are there gets told where they are not.
    if json.values.get("attention_bias") is True:
        fields["attention_bias"] = True
    if json.values.get("tie_word_embeddings") is False:
        fields["tied_head"] = False
    fields |= family.traits
    if "activation" not in fields:
        fields["activation"] = activation(json, "hidden_act")
    fields |= family.from_json(json, fields)
    if "rope" not in fields:
        fields["rope"] = rope(json, rope_settings(json), fields)
    fields["kinds"] = plain_kinds(fields.get("kinds", ()))
    json.check_rest(family.name)
    return ModelConfig(**fields)


def activation(json: ConfigJson, key: str) -> str:
    """Our name of the activation that `key` names; silu without the key."""
    name = json.value(key, "silu")
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise StokerError(
            f"{json.where}: '{key}' is {name!r:.40}, which is not supported; give a model with one "
            f"of {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def sliding_layers(json: ConfigJson, default: list[bool]) -> list[bool]:
    """Which layers have a window: those that `layer_types` says, or else those of `default`."""
    if not json.has("layer_types"):
        return default
    named = json.items("layer_types", len(default))
    unknown = [name for name in named if str(name) not in _LAYER_TYPES]
    if unknown:
        raise StokerError(
            f"{json.where}: layer_types has {unknown[0]!r:.40}, which is not supported; give a "
            f"model of {' and '.join(_LAYER_TYPES)}"
        )
    return [_LAYER_TYPES[str(name)] for name in named]


def windowed(
    fields: Mapping[str, Any], window: int, sliding: Iterable[bool]
) -> tuple[LayerKind, ...]:
    """A window on the layers that slide; one that the longest context does not reach is none."""
    window = window if window < fields["max_positions"] else 0
    return tuple(LayerKind(window if slides else 0) for slides in sliding)


def rope_settings(json: ConfigJson, layer_type: str | None = None) -> ConfigJson:
    """What `config.json` says of the rotary embedding, in one place.

    It may be in `rope_scaling`, whose kind is `type` or `rope_type`, in `rope_parameters`, perhaps
    one for each type of layer, and beside them. Two that contradict each other are an error.
    """
    merged: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        part = json.value(key, {})
        if isinstance(part, dict) and layer_type is not None and layer_type in part:
            part = part[layer_type] or {}
        if not isinstance(part, dict) or any(isinstance(value, dict) for value in part.values()):
            raise StokerError(f"{json.where}: '{key}' is {part!r:.60}, which is not supported")
        part = dict(part)
        if "type" in part:
            _merge(json, part, {"rope_type": part.pop("type")})
        _merge(json, merged, part)
    for key in ("rope_theta", "partial_rotary_factor"):
        if json.has(key):
            _merge(json, merged, {key: json.value(key)})
    if json.has("original_max_position_embeddings"):
        # Phi-3 keeps it here; it goes before one in the settings, as in transformers.
        merged["original_max_position_embeddings"] = json.value("original_max_position_embeddings")
    return ConfigJson(merged, f"{json.where}: rotary settings")


def _merge(json: ConfigJson, into: dict[str, Any], new: Mapping[str, Any]) -> None:
    for key, value in new.items():
        if value is None:
            continue
        if key in into and into[key] != value:
            raise StokerError(
                f"{json.where} gives '{key}' as {into[key]!r:.40} and as {value!r:.40}; keep the "
                "one that the model was trained with"
            )
        into[key] = value


def rope(
    json: ConfigJson, settings: ConfigJson, fields: Mapping[str, Any], theta: float = 10000.0
) -> Rope:
    """The rotary embedding that `rope_settings` describes; `theta` is the default base."""
    theta = settings.number("rope_theta", theta)
    dims = int(fields["head_dim"] * settings.number("partial_rotary_factor", 1.0))
    kind = settings.value("rope_type", "default")
    if kind == "su" or (kind == "yarn" and settings.has("short_factor")):
        kind = "longrope"  # names that Phi-3 had for it first
    original = settings.integer("original_max_position_embeddings", fields["max_positions"])
    try:
        if kind == "default":
            made = Rope(theta, dims)
        elif kind == "linear":
            made = Rope(theta, dims, scale=settings.number("factor"))
        elif kind == "llama3":
            made = Rope(theta, dims, factors=_llama3(settings, theta, dims, original))
        elif kind == "yarn":
            made = _yarn(settings, theta, dims, original, fields["max_positions"])
        elif kind == "longrope":
            made = _longrope(settings, theta, dims, original, fields["max_positions"])
        else:
            raise StokerError(
                f"{json.where}: rope_type is {kind!r:.40}, which is not supported; give a model "
                "with default, linear, llama3, yarn or longrope"
            )
    except (TypeError, ValueError, ArithmeticError) as error:
        raise StokerError(
            f"{settings.where} are not possible ({error}); download config.json again"
        ) from None
    settings.check_rest(f"rope {kind}", ())
    return made


def _llama3(settings: ConfigJson, theta: float, dims: int, original: int) -> tuple[float, ...]:
    return llama3_factors(
        theta,
        dims,
        factor=settings.number("factor"),
        low=settings.number("low_freq_factor"),
        high=settings.number("high_freq_factor"),
        original=original,
    )


def _yarn(settings: ConfigJson, theta: float, dims: int, original: int, positions: int) -> Rope:
    factor = settings.number("factor", positions / original)
    factors = yarn_factors(
        theta,
        dims,
        factor=factor,
        original=original,
        beta_fast=settings.number("beta_fast", 32.0),
        beta_slow=settings.number("beta_slow", 1.0),
        truncate=settings.flag("truncate", True),
    )
    mscale = settings.number("mscale", 0.0), settings.number("mscale_all_dim", 0.0)
    attention = settings.number("attention_factor", yarn_attention_factor(factor, *mscale))
    return Rope(theta, dims, factors=factors, attention_factor=attention)


def _longrope(settings: ConfigJson, theta: float, dims: int, original: int, positions: int) -> Rope:
    attention = settings.number(
        "attention_factor",
        longrope_attention_factor(settings.number("factor", positions / original), original),
    )
    short, long = (
        tuple(map(float, settings.items(f"{length}_factor", dims // 2, exact=True)))
        for length in ("short", "long")
    )
    return Rope(
        theta,
        dims,
        factors=short,
        attention_factor=attention,
        long_factors=long,
        original=original,
    )
