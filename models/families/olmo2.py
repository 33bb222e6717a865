"""OLMo 2: norms only after attention and MLP, and over all queries and all keys as one."""

from __future__ import annotations

from ..errors import StokerError
from .family import Family, Fields
from .gguf_config import Keys
from .naming import HF_POST_NORMS, hf_naming


def no_window(keys: Keys, fields: Fields) -> Fields:
    """OLMo 3 says that it is OLMo 2, but for its windows; its rotary embedding differs too."""
    if keys.integer("attention.sliding_window", 0):
        raise StokerError(
            f"'{keys.name('attention.sliding_window')}' makes this a model of OLMo 3, which is not "
            "supported; give a model of OLMo 2"
        )
    return {}


OLMO2 = Family(
    name="olmo2",
    model_types=("olmo2",),
    architecture="olmo2",
    traits={"pre_norm": False, "post_norm": True, "qk_norm": "full"},
    hf=hf_naming(HF_POST_NORMS),
    from_keys=no_window,
)
