"""OLMo 2: norms only after attention and MLP, and over all queries and all keys as one."""

from __future__ import annotations

from .family import Family
from .naming import HF_POST_NORMS, hf_naming
from .olmo3 import windows_of_keys

OLMO2 = Family(
    name="olmo2",
    model_types=("olmo2",),
    architecture="olmo2",
    traits={"pre_norm": False, "post_norm": True, "qk_norm": "full"},
    hf=hf_naming(HF_POST_NORMS),
    from_keys=windows_of_keys,
)
