"""Whole models by the Pallas kernels, interpreted, beside the reference; and who does what."""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType

import interpreted
import jax
import numpy as np
import pytest
from driving import chunk, decoding, new_state, page_table
from products import device
from quantised import random_quant
from tiny import DEEPSEEK, TINY

from stoker.engine import steps
from stoker.engine.cache import new_cache, page_bytes
from stoker.engine.sampling_params import SamplingParams
from stoker.models import ops
from stoker.models.config import Kernels, ModelConfig
from stoker.models.errors import StokerError
from stoker.models.loading import choose_kernels
from stoker.models.ops import gpu, tpu
from stoker.models.pages import layer_pages
from stoker.models.parameters import Params, is_weight
from stoker.models.parts import Latent
from stoker.models.quantized import QuantArray
from stoker.models.random_weights import random_weights

PACKAGES = {"tpu": tpu, "gpu": gpu}
RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(0, 512, n).tolist() for n in (23, 0, 5)]
#: One layer of everything: quantised projections and experts.
MODEL = dataclasses.replace(TINY, n_layers=1, n_experts=4, experts_per_token=2, d_ff=64)
#: Latent attention, and quantised matrices of each head.
LATENT = dataclasses.replace(
    TINY,
    n_layers=1,
    latent=Latent(kv_rank=32, rope_dim=8, nope_dim=32, v_dim=32),
    n_kv_heads=1,
    head_dim=40,
    rope=dataclasses.replace(TINY.rope, dims=8),
)


@pytest.fixture(params=PACKAGES)
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A platform whose kernels run interpreted."""
    package: ModuleType = PACKAGES[request.param]
    for name in ("attention", "latent_attention", "matmul", "grouped_matmul", "head_matmul"):
        kernel = functools.partial(getattr(package, name), interpret=True)
        monkeypatch.setattr(package, name, kernel)
    jax.clear_caches()
    return request.param


def logits(config: ModelConfig, params: Params) -> np.ndarray:
    """Of two prompts, run together, and then of a decode step."""
    table = page_table(3, 4)
    cache = new_cache(config, 12)
    prefill = functools.partial(steps.prefill_logits, config=config)
    cache, first = interpreted.run(prefill, params, cache, chunk(PROMPTS, [0, 0, 0], table, 32))
    state = dataclasses.replace(
        new_state([SamplingParams()] * 3),
        lengths=np.array([len(prompt) for prompt in PROMPTS], np.int32),
        tokens=np.array([4, 5, 6], np.int32),
    )
    decode = functools.partial(steps.decode_logits, config=config)
    batch = decoding([True, False, True], table)
    _, second = interpreted.run(decode, params, cache, state, batch)
    return np.stack([first, second])[:, [0, 2]]


def weights_of(config: ModelConfig) -> Params:
    """Quantised; with latent attention the matrices of heads alone, since `MODEL` has the rest."""
    params = random_weights(config, "int4")
    if config.latent is None:
        return params
    plain = random_weights(config, "float32")
    (layer,), (dense,) = params["layers"], plain["layers"]
    return plain | {"layers": (dense | {name: layer[name] for name in ("k_b", "v_b")},)}


@functools.cache
def reference(config: ModelConfig) -> np.ndarray:
    """What the reference says, once for all platforms."""
    return logits(config, weights_of(config))


# A last bit of a key may turn an int8 code, which is 1/127 of its row's largest element: what codes
# give exactly, the tests of attention tell.
@pytest.mark.parametrize(
    ("model", "kv_dtype", "tolerance"),
    [(MODEL, "float32", 2e-4), (MODEL, "int8", 3e-2), (LATENT, "float32", 2e-4)],
    ids=["float32", "int8", "latent"],
)
def test_models_agree_with_the_reference(
    platform: str, model: ModelConfig, kv_dtype: str, tolerance: float
) -> None:
    config = dataclasses.replace(model, kv_dtype=kv_dtype)
    own = dataclasses.replace(config, kernels=Kernels(platform))
    np.testing.assert_allclose(logits(own, weights_of(own)), reference(config), atol=tolerance)


@pytest.mark.parametrize("platform", PACKAGES)
def test_choices_name_the_kernels_and_the_exceptions(platform: str) -> None:
    config = dataclasses.replace(MODEL, kernels=Kernels(platform))
    weights = jax.tree.leaves(random_weights(config, "int4"), is_leaf=is_weight)
    found = ops.choices(config, weights)
    assert found["attention"].implementation == platform
    assert found["products"].implementation == platform
    assert found["grouped products"].implementation == platform
    latent = dataclasses.replace(LATENT, kernels=Kernels(platform))
    found = ops.choices(latent, jax.tree.leaves(random_weights(latent, "int8"), is_leaf=is_weight))
    assert found["attention"].implementation == platform
    assert found["head products"].implementation == platform
    odd = QuantArray(np.zeros((4, 36), np.uint8), np.zeros((4, 3), np.float32), bits=4, group=24)
    mixed = ops.choices(config, [*weights, odd])["products"]
    assert mixed.implementation == f"{platform} and xla"
    assert "1 by xla: " in mixed.why
    assert "written to memory" in mixed.why


@pytest.mark.parametrize("platform", PACKAGES)
def test_integers_serve_many_rows_where_they_were_asked_for(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Kernels(platform, "int8")
    wide, narrow = (device(random_quant(name, 16)) for name in ("awq", "q4_0"))
    for number, name in enumerate(("matmul", "integer_matmul")):
        fake = functools.partial(_constant, number)
        monkeypatch.setattr(PACKAGES[platform], name, fake)
        monkeypatch.setattr(PACKAGES[platform], name.replace("matmul", "grouped_matmul"), fake)

    def integers(weight: QuantArray, rows: int, kernels: Kernels = asked) -> bool:
        x = np.zeros((rows, weight.shape[1]), np.float32)
        several = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), weight)
        sizes = np.array([rows, rows], np.int32)
        (grouped,) = ops.grouped_products(np.concatenate([x, x]), [several], sizes, kernels)
        one = ops.matmul(x, weight, kernels)
        assert grouped[0, 0] == one[0, 0]
        return bool(one[0, 0])

    assert integers(wide, 128)
    assert not integers(wide, 127)
    assert not integers(narrow, 128)
    assert not integers(wide, 128, Kernels(platform))
    config = dataclasses.replace(MODEL, kernels=asked)
    both = ops.choices(config, [wide, narrow])["products"]
    assert both.implementation == platform
    assert "from 128 rows on, activations are rounded to int8" in both.why
    assert "groups of 32" in both.why


def _constant(
    value: int, x: jax.Array, weight: QuantArray, *_: jax.Array, dtype: type = np.float32
) -> np.ndarray:
    """In place of a product."""
    return np.full((x.shape[0], weight.shape[-2]), value, dtype)


def test_choices_without_kernels() -> None:
    assert ops.choices(MODEL)["attention"] == ops.Choice("xla", "the reference was asked for")
    wide = dataclasses.replace(MODEL, head_dim=512, kernels=Kernels("gpu"))
    assert ops.choices(wide)["attention"].implementation == "xla"
    assert "512" in ops.choices(wide)["attention"].why
    wide = dataclasses.replace(DEEPSEEK.latent, kv_rank=520)
    latent = dataclasses.replace(DEEPSEEK, latent=wide, kernels=Kernels("gpu"))
    assert "520 and 8 numbers are wider than 512 and 64" in ops.choices(latent)["attention"].why
    latent = dataclasses.replace(DEEPSEEK, kernels=Kernels("cpu"))
    assert ops.choices(latent)["attention"] == ops.Choice("cpu", "a compiled kernel")


def test_pages_follow_the_platform() -> None:
    def shapes(platform: str, head_dim: int, kv_dtype: str = "bfloat16") -> list[tuple[int, ...]]:
        config = dataclasses.replace(
            TINY, kernels=Kernels(platform), head_dim=head_dim, kv_dtype=kv_dtype
        )
        cache = new_cache(config, 2)
        assert page_bytes(config) * 3 == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
        assert [leaf.dtype for leaf in cache[0]] == [p.dtype for p in layer_pages(config, 1)]
        return [leaf.shape for leaf in cache[0]]

    assert shapes("xla", 64) == [(3, 2, 64, 16), (3, 2, 16, 64)]
    assert shapes("gpu", 64) == [(3, 2, 64, 64), (3, 2, 64, 64)]
    assert shapes("tpu", 256) == [(3, 2, 256, 128), (3, 2, 128, 256)]
    # Narrow heads lie across lanes, which they would not fill.
    assert shapes("tpu", 64) == [(3, 2, 64, 128), (3, 2, 64, 128)]
    scales = (3, 2, 16)
    assert shapes("xla", 8, "int8") == [(3, 2, 8, 16), scales, (3, 2, 16, 8), scales]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(StokerError, match="kernels 'tpu' were asked for, but this is a cpu host"):
        choose_kernels("tpu")
    with pytest.raises(StokerError, match="float32, bfloat16, int8, not float8_e4m3fn"):
        dataclasses.replace(TINY, kernels=Kernels("cpu"), kv_dtype="float8_e4m3fn")
