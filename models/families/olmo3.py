"""OLMo 3: OLMo 2 with a window on three of four layers, which YaRN leaves as they are."""

from __future__ import annotations

from ..config import Rope
from . import gguf_config
from .family import Family, Fields, turned_locally
from .gguf_config import Keys
from .hf_config import ConfigJson, rope, rope_settings, sliding_layers, windowed
from .naming import HF_POST_NORMS, hf_naming

_PERIOD = 4
_THETA = 500_000.0


def windows(json: ConfigJson, fields: Fields) -> Fields:
    """Layers with a window have a rotary embedding of their own, without scaling."""
    default = [(layer + 1) % _PERIOD != 0 for layer in range(fields["n_layers"])]
    sliding = sliding_layers(json, default)
    main = rope(json, rope_settings(json, "full_attention"), fields, _THETA)
    near = Rope(main.theta, main.dims)
    if "sliding_attention" in (json.values.get("rope_parameters") or {}):
        near = rope(json, rope_settings(json, "sliding_attention"), fields, _THETA)
    kinds = windowed(fields, json.integer("sliding_window", 4096), sliding)
    return {"rope": main, "local_rope": near, "kinds": turned_locally(kinds, sliding)}


def windows_of_keys(keys: Keys, fields: Fields) -> Fields:
    """The same from GGUF, where OLMo 3 says that it is OLMo 2, and only it has windows."""
    if not keys.integer("attention.sliding_window", 0):
        return {}
    sliding = gguf_config.sliding_layers(keys, fields, period=_PERIOD)
    main = fields["rope"]
    kinds = gguf_config.windowed(keys, fields, sliding)
    return {"local_rope": Rope(main.theta, main.dims), "kinds": turned_locally(kinds, sliding)}


OLMO3 = Family(
    name="olmo3",
    model_types=("olmo3",),
    traits={"pre_norm": False, "post_norm": True, "qk_norm": "full"},
    hf=hf_naming(HF_POST_NORMS),
    from_json=windows,
)
