"""The one abstract tree: every parameter's shape, type and logical axes.

Random initialisation, shardings, checkpoint loading and byte counts all derive from it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from .config import ModelConfig
from .ops.cpu import PackedArray
from .parts import Latent
from .quantized import QuantArray

#: A nested dict (layers: a tuple of dicts) of weights or of `Parameter`s.
Params = Any


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter, without its values; a leaf of `abstract_params`.

    Attributes:
      shape: matrices are `[outputs, inputs]`.
      axes: a logical axis name for each axis of `shape` (see `sharding/rules.py`).
      dtype: of the dense array; "any" where a checkpoint's own precision is kept.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: str = "any"

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


def abstract_params(config: ModelConfig) -> Params:
    """The tree of `Parameter`s of a model: `embedding`, `layers`, `final_norm`, perhaps `head`."""
    D, F, V = config.d_model, config.d_ff, config.vocab_size
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim

    def norm(width: int, axis: str | None = "model") -> Parameter:
        return Parameter((width,), (axis,), "float32")

    layer = {
        "q": Parameter((q, D), ("heads", "model")),
        "k": Parameter((kv, D), ("kv_heads", "model")),
        "v": Parameter((kv, D), ("kv_heads", "model")),
        "o": Parameter((D, q), ("model", "heads")),
    }
    if config.latent is not None:
        layer = _latent_attention(config, config.latent)
    if config.n_experts:
        E = config.n_experts
        layer |= {
            "router": Parameter((E, D), (None, "model")),
            "expert_gate": Parameter((E, F, D), ("experts", "ff", "model")),
            "expert_up": Parameter((E, F, D), ("experts", "ff", "model")),
            "expert_down": Parameter((E, D, F), ("experts", "model", "ff")),
        }
        if config.router.choice_bias:
            layer["choice_bias"] = Parameter((E,), (None,), "float32")
        if config.shared_d_ff:
            layer |= _gated_mlp(D, config.shared_d_ff, "shared_")
    else:
        layer |= _gated_mlp(D, F)
    if config.pre_norm:
        layer |= {"attn_norm": norm(D), "mlp_norm": norm(D)}
    if config.post_norm:
        layer |= {"attn_post_norm": norm(D), "mlp_post_norm": norm(D)}
    if config.qk_norm == "head":
        layer |= {"q_norm": norm(config.head_dim, None), "k_norm": norm(config.head_dim, None)}
    if config.qk_norm == "full":
        layer |= {"q_norm": norm(q, "heads"), "k_norm": norm(kv, "kv_heads")}
    if config.attention_sinks:
        layer["sinks"] = Parameter((config.n_heads,), ("heads",), "float32")
    biased = {"q": config.attention_bias, "k": config.attention_bias, "v": config.attention_bias}
    biased |= {"o": config.output_bias}
    one = "expert_" if config.n_experts else ""
    biased |= {f"{one}{name}": config.mlp_bias for name in ("gate", "up", "down")}
    biased |= {"router": config.router_bias}
    for name in (name for name, present in biased.items() if present):
        outputs = layer[name]
        layer[f"{name}_bias"] = Parameter(outputs.shape[:-1], outputs.axes[:-1], "float32")
    routed = ("router", "choice_bias", "expert_", "shared_")
    dense = {name: leaf for name, leaf in layer.items() if not name.startswith(routed)}
    dense |= _gated_mlp(D, config.dense_d_ff)
    tree = {
        "embedding": Parameter((V, D), ("vocab", "model")),
        "layers": tuple(
            dict(dense if number < config.dense_layers else layer)
            for number in range(config.n_layers)
        ),
        "final_norm": norm(D),
    }
    if not config.tied_head:
        tree["head"] = Parameter((V, D), ("vocab", "model"))
    return tree


def _gated_mlp(D: int, F: int, prefix: str = "") -> dict[str, Parameter]:
    """The three matrices of an MLP of width F."""
    return {
        f"{prefix}gate": Parameter((F, D), ("ff", "model")),
        f"{prefix}up": Parameter((F, D), ("ff", "model")),
        f"{prefix}down": Parameter((D, F), ("model", "ff")),
    }


def _latent_attention(config: ModelConfig, latent: Latent) -> dict[str, Parameter]:
    """The projections of latent attention (arXiv 2405.04434, section 2.1).

    `k_b` and `v_b` hold a matrix for each head: `k_b` takes queries into the latent space (W_UK,
    whose inputs are the elements of a head), `v_b` takes what was attended to out of it (W_UV).
    """
    D, N, R = config.d_model, config.n_heads, latent.kv_rank
    inputs: tuple[int, str | None] = (latent.q_rank, None) if latent.q_rank else (D, "model")
    query = Parameter((N * latent.head_dim, inputs[0]), ("heads", inputs[1]))
    layer = {"q_b" if latent.q_rank else "q": query}
    if latent.q_rank:
        layer["q_a"] = Parameter((latent.q_rank, D), (None, "model"))
        layer["q_a_norm"] = Parameter((latent.q_rank,), (None,), "float32")
    return layer | {
        "kv_a": Parameter((latent.width, D), (None, "model")),
        "kv_a_norm": Parameter((R,), (None,), "float32"),
        "k_b": Parameter((N, R, latent.nope_dim), ("heads", None, None)),
        "v_b": Parameter((N, latent.v_dim, R), ("heads", None, None)),
        "o": Parameter((D, N * latent.v_dim), ("model", "heads")),
    }


def named_parameters(abstract: Params) -> Iterator[tuple[str, Parameter]]:
    """Dotted path and `Parameter` of each leaf, for example `layers.3.attn_norm`."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract):
        yield jax.tree_util.keystr(path, simple=True, separator="."), leaf


def unflatten(abstract: Params, values: dict[str, Any]) -> Params:
    """The tree of `abstract` with each leaf replaced by the value of its dotted path."""
    leaves = [values[name] for name, _ in named_parameters(abstract)]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def init_params(config: ModelConfig, key: jax.Array, scale: float = 1.0) -> Params:
    """Random parameters.

    Norms are ones, biases zeros, matrices normal with standard deviation scale / sqrt(inputs).
    Dense matrices take `config.dtype`; norms and biases stay float32.
    """
    values = {}
    for index, (name, parameter) in enumerate(named_parameters(abstract_params(config))):
        if parameter.dtype != "any":
            fill = jnp.zeros if name.endswith("bias") else jnp.ones
            values[name] = fill(parameter.shape, parameter.dtype)
        else:
            noise = jax.random.normal(jax.random.fold_in(key, index), parameter.shape)
            values[name] = (noise * scale / math.sqrt(parameter.shape[-1])).astype(config.dtype)
    return unflatten(abstract_params(config), values)


def is_weight(node: Any) -> bool:
    """Whether a tree walk should stop here: a quantised array counts as one leaf."""
    return isinstance(node, QuantArray | PackedArray)


def count_bytes(params: Params) -> int:
    """Bytes of all leaves, which may be shapes without values."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))


def count_elements(abstract: Params) -> int:
    """Elements of all parameters, quantised or not."""
    return sum(leaf.size for leaf in jax.tree.leaves(abstract, is_leaf=is_weight))
