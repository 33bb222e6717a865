"""Every operation of this host's kernels on fresh random inputs, against float32 and float64."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stoker.engine import steps
from stoker.engine.cache import new_cache
from stoker.engine.sampling_params import SamplingParams
from stoker.engine.sampling_rows import pack_sampling
from stoker.models import ops
from stoker.models.config import PALLAS, Kernels, ModelConfig, Rope
from stoker.models.ops import xla
from stoker.models.pages import page_tokens, values_by_token
from stoker.models.quantise import Quantisation, quantise
from stoker.models.quantized import densify, ready
from stoker.models.random_weights import random_weights

#: Errors relative to the largest result: bfloat16 operands and results are rounded to 2**-9, and
#: so is what int8 codes and float8 pages stand for, to 1/254 and 2**-4.
_BFLOAT16, _INT8, _FLOAT8 = 1.5e-2, 3e-2, 1e-1
_REFERENCE = Kernels("xla")


@dataclasses.dataclass(frozen=True)
class Result:
    """How one operation did: its largest error relative to the largest result, and what may be."""

    name: str
    error: float | None
    allowed: float
    verdict: str


def check_operations(kernels: Kernels, deadline: float, only: str = "") -> list[Result]:
    """Operations whose names hold `only`, until `deadline` of `time.monotonic`.

    Inputs differ from run to run.
    """
    rng = np.random.default_rng(time.time_ns())
    found = []
    for name, allowed, check in _checks(rng, kernels):
        if only not in name:
            continue
        if time.monotonic() > deadline:
            found.append(Result(name, None, allowed, "no time left"))
            continue
        try:
            result, wanted = (np.asarray(array, np.float64) for array in check())
            error = float(np.abs(result - wanted).max() / np.abs(wanted).max())
            found.append(Result(name, error, allowed, "ok" if error <= allowed else "WRONG"))
        except Exception as error:  # one failure must not cost the rest of the lease
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            found.append(Result(name, None, allowed, f"WRONG ({text})"))
    return found


Check = Callable[[], tuple[Any, Any]]


def _checks(rng: np.random.Generator, kernels: Kernels) -> Iterator[tuple[str, float, Check]]:
    for weights in ("bfloat16", "int8", "int4", "mxfp4"):
        layer = random_weights(_config(kernels), weights)["layers"][0]
        for rows in (1, 32, 300):
            x = _normal(rng, rows, 1024)
            check = lambda x=x, w=layer["q"]: _product(x, w, kernels)  # noqa: E731
            yield f"product, {weights}, {rows} rows", _BFLOAT16, check
        sizes = rng.multinomial(96, rng.dirichlet(np.ones(8)))
        sizes[sizes.argmin()] = 0
        x = _normal(rng, int(sizes.sum()), 1024)
        check = lambda x=x, w=layer["expert_up"], s=sizes: _grouped(x, w, s, kernels)  # noqa: E731
        yield f"grouped product, {weights}", _BFLOAT16, check
    for how in ("int4:group=128", "int4:group=128,minimum=false", "int8:group=128"):
        check = lambda how=how: _integers(rng, how, kernels)  # noqa: E731
        yield f"product, {how}, int8 activations", _INT8, check
    for heads, width in ((8, 64), (8, 128), (4, 256)):
        for pages, allowed in (
            ("bfloat16", _BFLOAT16),
            ("int8", _INT8),
            ("float8_e4m3fn", _FLOAT8),
        ):
            sizes = (heads, 2, width, pages)
            check = lambda sizes=sizes: _attention(rng, kernels, *sizes)  # noqa: E731
            yield f"attention, heads of {width}, {pages} pages", allowed, check
    options = {"window": 70, "softcap": 30.0, "sinks": jnp.asarray(rng.normal(size=8), jnp.float32)}
    yield (
        "attention, window, soft-cap and sinks",
        _BFLOAT16,
        lambda: _attention(rng, kernels, 8, 2, 128, "bfloat16", **options),
    )
    yield "sampled tokens", 0.0, lambda: _samples(rng, kernels)
    yield "largest logits", 0.0, lambda: _largest(rng, kernels)
    for weights in ("bfloat16", "int4"):
        yield f"a model's logits, {weights}", 5e-2, lambda w=weights: _model(rng, kernels, w)


def _normal(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)


def _config(kernels: Kernels, dtype: str = "bfloat16", **fields: Any) -> ModelConfig:
    base = ModelConfig(
        family="llama",
        vocab_size=4096,
        d_model=1024,
        n_layers=2,
        n_heads=8,
        n_kv_heads=2,
        head_dim=128,
        d_ff=2048,
        max_positions=1024,
        norm_eps=1e-5,
        rope=Rope(10000.0, 64),
        n_experts=8,
        experts_per_token=2,
        dtype=dtype,
        kv_dtype=dtype,
        kernels=kernels,
    )
    return dataclasses.replace(base, **fields)


def _wide(array: Any) -> np.ndarray:
    return np.asarray(densify(array, jnp.float32), np.float64)


def _product(x: jax.Array, weight: Any, kernels: Kernels) -> tuple[Any, Any]:
    found = jax.jit(lambda x, w: ops.matmul(x, w, kernels))(x, weight)
    return found.astype(jnp.float32), _wide(x) @ _wide(weight).T


def _integers(rng: np.random.Generator, how: str, kernels: Kernels) -> tuple[Any, Any]:
    """A product whose activations are rounded to int8, where there are kernels for it."""
    weight: Any = quantise(
        rng.normal(size=(1024, 2048)).astype(np.float32), Quantisation.parse(how)
    )
    if kernels.platform == "tpu":
        weight = ready(weight)
    asked = (
        dataclasses.replace(kernels, activations="int8") if kernels.platform in PALLAS else kernels
    )
    return _product(_normal(rng, 300, 2048), jax.tree.map(jnp.asarray, weight), asked)


def _grouped(x: jax.Array, weight: Any, sizes: np.ndarray, kernels: Kernels) -> tuple[Any, Any]:
    run = jax.jit(lambda x, w, s: ops.grouped_products(x, (w,), s, kernels)[0])
    found = run(x, weight, jnp.asarray(sizes, jnp.int32))
    group = np.repeat(np.arange(len(sizes)), sizes)
    wide, rows = _wide(weight), _wide(x)
    wanted = np.stack([wide[g] @ row for g, row in zip(group, rows, strict=True)])
    return found.astype(jnp.float32), wanted


def _attention(
    rng: np.random.Generator, kernels: Kernels, N: int, K: int, H: int, pages: str, **options: Any
) -> tuple[Any, Any]:
    """A chunk of prompts, then a mixed step: rows of both, kernels beside float32."""
    config = _config(kernels, n_heads=N, n_kv_heads=K, head_dim=H, kv_dtype=pages, n_layers=1)
    plain = dataclasses.replace(config, kernels=_REFERENCE, kv_dtype="float32")
    lens = [200, 1, 0, 77]
    chunks = [(lens, lens), ([1, 3, 5, 40], [201, 4, 5, 117])]
    outs: list[list[np.ndarray]] = [[], []]
    caches = [new_cache(config, 40)[0], new_cache(plain, 40, page_tokens(kernels))[0]]
    width = -(-256 // page_tokens(kernels))
    table = jnp.asarray(1 + np.arange(4 * width).reshape(4, width), jnp.int32)
    for rows, total in chunks:
        T = sum(rows)
        x = [_normal(rng, T, heads, H) for heads in (N, K, K)]
        starts = jnp.asarray(np.cumsum([0, *rows]), jnp.int32)
        layout = ops.Layout(starts, jnp.asarray(total, jnp.int32), table, max(rows))
        still = (jnp.ones((T, H // 2)), jnp.zeros((T, H // 2)))
        own = functools.partial(ops.attention, kernels=kernels, turn=still, scale=H**-0.5)
        exact = functools.partial(xla.attention, scale=H**-0.5, by_token=values_by_token(config))
        for at, attend in enumerate((own, exact)):
            rounded = x if at == 0 else [part.astype(jnp.float32) for part in x]
            call = functools.partial(attend, **options)
            with jax.default_matmul_precision("highest"):
                out, *new = jax.jit(call)(*rounded, *ops.pack_pages(caches[at]), layout)
            caches[at] = tuple(jax.tree.leaves(tuple(new)))
            outs[at].append(np.asarray(out, np.float64))
    return np.concatenate(outs[0]), np.concatenate(outs[1])


def _sampling(count: int, vocab: int) -> tuple[Any, ...]:
    ways = [SamplingParams(), SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=3)]
    ways += [SamplingParams(temperature=1.1, min_p=0.05, seed=4)] * (count - 2)
    rows = jax.tree.map(jnp.asarray, pack_sampling(ways, vocab, [0] * count, []))
    history = jnp.zeros((count, 16), jnp.int32)
    numbers = jnp.arange(count, dtype=jnp.int32)
    return rows, history, numbers, numbers + 5


def _samples(rng: np.random.Generator, kernels: Kernels) -> tuple[Any, Any]:
    logits = np.asarray(rng.normal(size=(8, 32000)) * 4, np.float32)
    uniform = np.asarray(rng.uniform(size=8), np.float32)
    found = []
    for device, chosen in ((jax.devices()[0], kernels), (_host(), _REFERENCE)):
        with jax.default_device(device):
            rest = _sampling(8, 32000)
            run = jax.jit(lambda x, u, *r, chosen=chosen: ops.sample(x, *r, u, chosen)[0])
            found.append(run(jnp.asarray(logits), jnp.asarray(uniform), *rest))
    return found[0], found[1]


def _largest(rng: np.random.Generator, kernels: Kernels) -> tuple[Any, Any]:
    logits = np.asarray(rng.normal(size=(8, 32000)), np.float32)
    run = jax.jit(lambda x, w: ops.largest(x, w, 20, kernels)[1])
    ids = run(jnp.asarray(logits), jnp.ones(8, bool))
    return ids, np.argsort(-logits, axis=-1, kind="stable")[:, :20]


def _host() -> jax.Device:
    return jax.local_devices(backend="cpu")[0]


def _model(rng: np.random.Generator, kernels: Kernels, weights: str) -> tuple[Any, Any]:
    """Prefill and decode logits of a small model, beside the reference in float32 on the host."""
    own = _config(kernels, n_experts=0, experts_per_token=0)
    plain = dataclasses.replace(own, kernels=_REFERENCE, dtype="float32", kv_dtype="float32")
    prompt = rng.integers(0, 4096, 100).astype(np.int32)
    logits = []
    for device, config in ((jax.devices()[0], own), (_host(), plain)):
        with jax.default_device(device):
            # Drawn in the same type, so that both have the same values.
            params = random_weights(dataclasses.replace(own, kernels=config.kernels), weights)
            cache = new_cache(config, 8)
            tokens = page_tokens(config.kernels)
            table = np.arange(1, 1 + -(-128 // tokens), dtype=np.int32)[None]
            zero = np.zeros(1, np.int32)
            starts, samples = np.array([0, 100], np.int32), np.ones(1, bool)
            batch = steps.PrefillBatch(prompt, starts, zero, table, zero, samples)
            run = jax.jit(steps.prefill_logits, static_argnames="config")
            logits.append(np.asarray(run(params, cache, batch, config=config)[1], np.float64))
    return logits[0], logits[1]
