"""Models on meshes of forced host devices give what one device gives."""

from __future__ import annotations

import pytest
from eight_devices import on_eight_devices

#: For each kind of model, weights and kernels, the meshes that must give one device's logits.
JOBS = {
    "dense": ["plain/tensor:2/data:2,tensor:2/sequence:4"],
    "smollm2": ["smollm2/tensor:2/sequence:2,tensor:4"],
    "few_kv_heads": ["groups/tensor:8", "one_kv_head/tensor:4"],
    "norms": ["six_heads/tensor:4"],
    "window": ["window/sequence:4", "window+float32+cpu/tensor:2/sequence:4"],
    "experts": ["experts/expert:4/data:2,expert:2,tensor:2", "shared_expert/expert:2,tensor:2"],
    "latent": ["latent/tensor:2/sequence:2,tensor:2", "latent+float32+cpu/sequence:4"],
    "quantised": [
        "plain+int4+cpu/tensor:8",
        "plain+int8/tensor:4",
        "plain+int8+cpu/sequence:2,tensor:2",
        "experts+int4+cpu/expert:2,tensor:2",
    ],
}


@pytest.mark.parametrize("kind", JOBS)
def test_logits_equal_those_of_one_device(helpers_on_path: dict[str, str], kind: str) -> None:
    assert on_eight_devices(helpers_on_path, "-m", "meshes", *JOBS[kind]) == "equal\n"
