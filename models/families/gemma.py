"""Gemma 1, 2 and 3 (text).

All scale embeddings by sqrt(D), gate with GELU and keep norm weights less 1. Gemma 2 adds norms
after attention and MLP, soft-caps, and windows on every other layer; Gemma 3 has no caps but norms
on queries and keys, and a second rotary embedding for its layers with a window, which are five of
six.
"""

from __future__ import annotations

import math

from ..config import Rope
from . import gguf_config
from .family import Family, Fields, turned_locally
from .gguf_config import Keys
from .hf_config import ConfigJson, rope, rope_settings, sliding_layers, windowed
from .naming import HF_POST_NORMS, hf_naming

_LOCAL_THETA = 10_000.0
_GLOBAL_THETA = 1_000_000.0
#: Layers of the models whose queries are scaled by (D / N) ** -0.5: 27B of Gemma 2 and of Gemma 3.
#: GGUF files do not say.
_LARGEST = {"gemma2": 46, "gemma3": 62}


def _shared(fields: Fields) -> dict[str, object]:
    return {"embedding_scale": math.sqrt(fields["d_model"])}


def first(json: ConfigJson, fields: Fields) -> dict[str, object]:
    """Gemma 1, and what all share: the head width has a default of its own."""
    for key in ("hidden_act", "hidden_activation"):
        # Early files say gelu and mean its approximation by tanh.
        if json.value(key, "gelu") not in ("gelu", "gelu_pytorch_tanh"):
            json.unsupported(key)
    return {**_shared(fields), "head_dim": json.integer("head_dim", 256)}


def _scores(json: ConfigJson, caps: tuple[float, float]) -> dict[str, object]:
    """Scale of attention, and soft-caps, whose defaults are `caps`; null turns one off."""
    scalar = json.number("query_pre_attn_scalar", 256.0)
    if scalar <= 0:
        json.unsupported("query_pre_attn_scalar")
    found: dict[str, object] = {"attention_scale": scalar**-0.5}
    for field, key, cap in (
        ("attention_softcap", "attn_logit_softcapping", caps[0]),
        ("logit_softcap", "final_logit_softcapping", caps[1]),
    ):
        default = 0.0 if key in json.values else cap
        found[field] = json.number(key, default)
    return found


def second(json: ConfigJson, fields: Fields) -> Fields:
    """Gemma 2."""
    sliding = sliding_layers(json, [layer % 2 == 0 for layer in range(fields["n_layers"])])
    return {
        **first(json, fields),
        **_scores(json, (50.0, 30.0)),
        "kinds": windowed(fields, json.integer("sliding_window", 4096), sliding),
    }


def third(json: ConfigJson, fields: Fields) -> Fields:
    """Gemma 3: layers with a window have a rotary embedding of their own, without scaling."""
    period = json.integer("sliding_window_pattern", 6) or 1
    sliding = [(layer + 1) % period != 0 for layer in range(fields["n_layers"])]
    sliding = sliding_layers(json, sliding)
    kinds = windowed(fields, json.integer("sliding_window", 4096), sliding)
    shared = first(json, fields)
    whole = {**fields, **shared}
    main = rope(json, rope_settings(json, "full_attention"), whole, _GLOBAL_THETA)
    theta = json.number("rope_local_base_freq", _LOCAL_THETA)
    near = Rope(theta, main.dims)
    if "sliding_attention" in (json.values.get("rope_parameters") or {}):
        near = rope(json, rope_settings(json, "sliding_attention"), whole, theta)
    return {
        **shared,
        **_scores(json, (0.0, 0.0)),
        "rope": main,
        "local_rope": near,
        "kinds": turned_locally(kinds, sliding),
    }


def _largest(fields: Fields) -> Fields:
    if fields["n_layers"] == _LARGEST[fields["family"]]:
        return {"attention_scale": (fields["d_model"] / fields["n_heads"]) ** -0.5}
    return {}


def first_keys(keys: Keys, fields: Fields) -> Fields:
    """Gemma 1 from GGUF."""
    return _shared(fields)


def second_keys(keys: Keys, fields: Fields) -> Fields:
    """Gemma 2 from GGUF."""
    return {
        **_shared(fields),
        **_largest(fields),
        "attention_softcap": keys.number("attn_logit_softcapping", 50.0),
        "logit_softcap": keys.number("final_logit_softcapping", 30.0),
        "kinds": gguf_config.windowed(
            keys, fields, gguf_config.sliding_layers(keys, fields, period=2)
        ),
    }


def third_keys(keys: Keys, fields: Fields) -> Fields:
    """Gemma 3 from GGUF."""
    sliding = gguf_config.sliding_layers(keys, fields, period=6)
    theta = keys.number("rope.freq_base_swa", _LOCAL_THETA)
    return {
        **_shared(fields),
        **_largest(fields),
        "logit_softcap": keys.number("final_logit_softcapping", 0.0),
        "local_rope": Rope(theta, fields["rope"].dims),
        "kinds": turned_locally(gguf_config.windowed(keys, fields, sliding), sliding),
    }


GEMMA = Family(
    name="gemma",
    model_types=("gemma",),
    architecture="gemma",
    traits={"activation": "gelu_tanh"},
    hf=hf_naming(norm_offset=1.0),
    from_json=first,
    from_keys=first_keys,
)
GEMMA2 = Family(
    name="gemma2",
    model_types=("gemma2",),
    architecture="gemma2",
    traits={"activation": "gelu_tanh", "post_norm": True},
    hf=hf_naming(HF_POST_NORMS, norm_offset=1.0),
    from_json=second,
    from_keys=second_keys,
)
GEMMA3 = Family(
    name="gemma3",
    model_types=("gemma3_text",),
    architecture="gemma3",
    traits={"activation": "gelu_tanh", "post_norm": True, "qk_norm": "head"},
    hf=hf_naming(HF_POST_NORMS, norm_offset=1.0),
    from_json=third,
    from_keys=third_keys,
)
