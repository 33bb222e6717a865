"""DeepSeek-V2 and V3: latent attention, and many small experts chosen in groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from typing import Any

import numpy as np

from ..config import ModelConfig, Rope
from ..errors import StokerError
from ..parts import Latent, Router
from ..rotary import yarn_mscale
from .family import Family, Fields
from .gguf_config import Keys
from .hf_config import ConfigJson, rope, rope_settings
from .naming import Naming, TensorUse, gguf_naming, hf_naming

_ATTENTION = "model.layers.{layer}.self_attn."
_MLP = "model.layers.{layer}.mlp."
_SHARED = ("gate", "up", "down")
_HF_NAMES = {
    "q_a": _ATTENTION + "q_a_proj.weight",
    "q_a_norm": _ATTENTION + "q_a_layernorm.weight",
    "q_b": _ATTENTION + "q_b_proj.weight",
    "kv_a": _ATTENTION + "kv_a_proj_with_mqa.weight",
    "kv_a_norm": _ATTENTION + "kv_a_layernorm.weight",
    "k_b": _ATTENTION + "kv_b_proj.weight",
    "v_b": _ATTENTION + "kv_b_proj.weight",
    "choice_bias": _MLP + "gate.e_score_correction_bias",
    **{f"shared_{name}": f"{_MLP}shared_experts.{name}_proj.weight" for name in _SHARED},
}
_GGUF_NAMES = {
    "q_a": "blk.{layer}.attn_q_a.weight",
    "q_a_norm": "blk.{layer}.attn_q_a_norm.weight",
    "q_b": "blk.{layer}.attn_q_b.weight",
    "kv_a": "blk.{layer}.attn_kv_a_mqa.weight",
    "kv_a_norm": "blk.{layer}.attn_kv_a_norm.weight",
    "k_b": "blk.{layer}.attn_k_b.weight",
    "v_b": "blk.{layer}.attn_v_b.weight",
    "choice_bias": "blk.{layer}.exp_probs_b.bias",
    **{f"shared_{name}": f"blk.{{layer}}.ffn_{name}_shexp.weight" for name in _SHARED},
}
#: One tensor in place of `k_b` and `v_b`, in older GGUF files as in those of Hugging Face.
_GGUF_FUSED = "blk.{layer}.attn_kv_b.weight"


@dataclasses.dataclass(frozen=True)
class LatentNaming(Naming):
    """Names of models with latent attention.

    Where `k_b` and `v_b` share a tensor, its rows are those of head 0's key, then its value, then
    head 1's, and so on; `k_b` is the transpose of its part.

    Attributes:
      fused: another name that `k_b` and `v_b` share in some checkpoints, or empty.
      layer_prefix: how the names of a layer begin.
    """

    fused: str = ""
    layer_prefix: str = ""

    def fitting(self, tensors: Container[str]) -> Naming:
        """With `k_b` and `v_b` where this checkpoint has them."""
        if not self.fused or self.fused.format(layer=0) not in tensors:
            return self
        shared = {"k_b": self.fused, "v_b": self.fused}
        return dataclasses.replace(self, tensors={**self.tensors, **shared})

    def uses(self, config: ModelConfig) -> dict[str, TensorUse]:
        """As `Naming.uses`, but for the tensors that two matrices of each head share."""
        uses = super().uses(config)
        if self.tensors["k_b"] != self.tensors["v_b"]:
            return uses
        latent = _latent_of(config)
        rows = config.n_heads * (latent.nope_dim + latent.v_dim)
        for path, use in uses.items():
            name = path.rpartition(".")[2]
            if name in ("k_b", "v_b"):
                uses[path] = TensorUse(
                    use.tensors,
                    (rows, latent.kv_rank),
                    slice(None),
                    heads=config.n_heads,
                    transposed=name == "k_b",
                )
        return uses

    def row_order(self, path: str, config: ModelConfig) -> np.ndarray | None:
        """Rotated rows from pairs to halves, and the key or value rows of each head."""
        name, latent = path.rpartition(".")[2], _latent_of(config)
        turned = np.arange(latent.rope_dim, dtype=np.int32)
        if latent.interleaved:
            turned = turned.reshape(-1, 2).T.reshape(-1)
        if name in ("q", "q_b"):
            plain = np.arange(latent.nope_dim, dtype=np.int32)
            head = np.concatenate([plain, latent.nope_dim + turned])
            return _of_each(config.n_heads, latent.head_dim, head)
        if name == "kv_a":
            plain = np.arange(latent.kv_rank, dtype=np.int32)
            return np.concatenate([plain, latent.kv_rank + turned])
        if name in ("k_b", "v_b") and self.tensors["k_b"] == self.tensors["v_b"]:
            width = latent.nope_dim + latent.v_dim
            first, last = (0, latent.nope_dim) if name == "k_b" else (latent.nope_dim, width)
            return _of_each(config.n_heads, width, np.arange(first, last, dtype=np.int32))
        return None

    def unread(self, name: str, config: ModelConfig) -> bool:
        """Whether a tensor is of a layer that predicts further tokens."""
        beginning = self.layer_prefix.partition("{layer}")[0]
        number = name.removeprefix(beginning).partition(".")[0]
        return (
            name.startswith(beginning)
            and number.isdecimal()
            and len(number) < 10
            and config.n_layers <= int(number) < config.n_layers + config.predict_layers
        )


def _latent_of(config: ModelConfig) -> Latent:
    if config.latent is None:
        raise StokerError(f"family '{config.family}' needs latent attention; give its ranks")
    return config.latent


def _of_each(heads: int, width: int, rows: np.ndarray) -> np.ndarray:
    """The given rows of each head, int32."""
    return (np.arange(heads, dtype=np.int32)[:, None] * np.int32(width) + rows).reshape(-1)


def of_json(json: ConfigJson, fields: Fields) -> dict[str, Any]:
    """What V2 and V3 have in common; `router` is left to them."""
    latent = Latent(
        kv_rank=json.integer("kv_lora_rank"),
        rope_dim=json.integer("qk_rope_head_dim"),
        nope_dim=json.integer("qk_nope_head_dim"),
        v_dim=json.integer("v_head_dim"),
        q_rank=json.integer("q_lora_rank", 0),
        interleaved=json.flag("rope_interleave", True),
    )
    if json.integer("qk_head_dim", latent.head_dim) != latent.head_dim:
        json.unsupported("qk_head_dim")
    if json.flag("attention_bias", False):
        json.unsupported("attention_bias")
    if json.integer("moe_layer_freq", 1) != 1:
        json.unsupported("moe_layer_freq")
    for key in ("aux_loss_alpha", "seq_aux", "ep_size", "output_router_logits"):
        json.value(key, 0)  # of training and of how others spread experts
    width = json.integer("moe_intermediate_size")
    settings = rope_settings(json)
    dense = json.integer("first_k_dense_replace", 0)
    return {
        "latent": latent,
        "head_dim": latent.head_dim,
        "n_kv_heads": 1,
        "rope": rope(json, settings, {**fields, "head_dim": latent.rope_dim}),
        "attention_scale": _scale(settings, latent, fields["max_positions"]),
        "n_experts": json.integer("n_routed_experts"),
        "experts_per_token": json.integer("num_experts_per_tok"),
        "d_ff": width,
        "dense_layers": dense,
        "dense_d_ff": fields["d_ff"] if dense else 0,
        "shared_d_ff": width * json.integer("n_shared_experts", 0),
        "predict_layers": json.integer("num_nextn_predict_layers", 0),
    }


def _scale(settings: ConfigJson, latent: Latent, positions: int) -> float:
    """Factor on scores: YaRN sharpens them where `mscale_all_dim` says so."""
    scale = latent.head_dim**-0.5
    if settings.value("rope_type", "default") == "default":
        return scale
    original = settings.integer("original_max_position_embeddings", positions)
    factor = settings.number("factor", positions / max(original, 1))
    return scale * yarn_mscale(factor, settings.number("mscale_all_dim", 0.0)) ** 2


def v2(json: ConfigJson, fields: Fields) -> Fields:
    """Softmax scores; the best experts of all, or of the groups with the best ones."""
    groups = {"greedy": False, "group_limited_greedy": True}
    method = json.value("topk_method", "greedy")
    if not isinstance(method, str) or method not in groups:
        json.unsupported("topk_method")
    if json.value("scoring_func", "softmax") != "softmax":
        json.unsupported("scoring_func")
    # Published models all say false; the makers' code would then leave out the scale.
    if json.flag("norm_topk_prob", False):
        json.unsupported("norm_topk_prob")
    count, used = json.integer("n_group", 1), json.integer("topk_group", 1)
    router = Router(scale=json.number("routed_scaling_factor", 1.0))
    if groups[method]:
        router = dataclasses.replace(router, groups=count, used_groups=used)
    return {**of_json(json, fields), "router": router, "expert_norm": False}


def v3(json: ConfigJson, fields: Fields) -> Fields:
    """Sigmoid scores with a bias for the choice; groups are as good as their two best experts."""
    if json.value("topk_method", "noaux_tc") != "noaux_tc":
        json.unsupported("topk_method")
    if json.value("scoring_func", "sigmoid") != "sigmoid":
        json.unsupported("scoring_func")
    router = Router(
        scores="sigmoid",
        choice_bias=True,
        groups=json.integer("n_group", 8),
        used_groups=json.integer("topk_group", 4),
        group_top=2,
        scale=json.number("routed_scaling_factor", 2.5),
    )
    normalised = json.flag("norm_topk_prob", True)
    return {**of_json(json, fields), "router": router, "expert_norm": normalised}


def of_keys(keys: Keys, fields: Fields) -> Fields:
    """Either from GGUF, where key and value widths may be those of the latent space.

    Newer files have `key_length` W and `value_length` R, and those of heads in keys of their own.
    """
    rope_dim = keys.integer("rope.dimension_count")
    query = keys.integer("attention.key_length_mla", fields["head_dim"])
    value = keys.integer("attention.value_length_mla", keys.integer("attention.value_length"))
    if query <= rope_dim:
        raise StokerError(
            f"'{keys.name('attention.key_length')}' {query} leaves nothing beside the "
            f"{rope_dim} rotated elements; convert the model again"
        )
    latent = Latent(
        kv_rank=keys.integer("attention.kv_lora_rank"),
        rope_dim=rope_dim,
        nope_dim=query - rope_dim,
        v_dim=value,
        q_rank=keys.integer("attention.q_lora_rank", 0),
    )
    predicting = keys.integer("nextn_predict_layers", 0)
    layers = fields["n_layers"] - predicting
    dense = min(keys.integer("leading_dense_block_count", 0), layers)
    width = keys.integer("expert_feed_forward_length")
    turn, scale = _yarn_of_keys(keys, fields["rope"], latent)
    return {
        "latent": latent,
        "head_dim": latent.head_dim,
        "n_kv_heads": 1,
        "n_layers": layers,
        "rope": turn,
        "attention_scale": scale,
        "n_experts": keys.integer("expert_count"),
        "experts_per_token": keys.integer("expert_used_count"),
        "expert_norm": bool(keys.value("expert_weights_norm", False)),
        "router": _router_of_keys(keys, layers),
        "d_ff": width,
        "dense_layers": dense,
        "dense_d_ff": fields["d_ff"] if dense else 0,
        "shared_d_ff": width * keys.integer("expert_shared_count", 0),
        "predict_layers": predicting,
    }


def _router_of_keys(keys: Keys, layers: int) -> Router:
    """Files older than the key for it have softmax scores."""
    kinds = {0: "softmax", 1: "softmax", 2: "sigmoid"}
    kind = keys.integer("expert_gating_func", 0)
    if kind not in kinds:
        raise StokerError(
            f"'{keys.name('expert_gating_func')}' is {kind}, which is not supported; give a model "
            "with softmax or sigmoid"
        )
    groups = keys.integer("expert_group_count", 1) or 1
    used = keys.integer("expert_group_used_count", groups) or groups
    name = _GGUF_NAMES["choice_bias"]
    biased = any(name.format(layer=n) in keys.checkpoint.tensors for n in range(layers))
    scale = keys.number("expert_weights_scale", 1.0) or 1.0
    # V2 goes by a group's best expert, V3 by its two best; the file does not say.
    top = 2 if kinds[kind] == "sigmoid" else 1
    return Router(kinds[kind], biased, groups, used, top, scale)


def _yarn_of_keys(keys: Keys, turn: Rope, latent: Latent) -> tuple[Rope, float]:
    """The rotary embedding and the factor on scores.

    `yarn_log_multiplier` is a tenth of `mscale_all_dim`. Files do not tell `mscale`, which is the
    same in all published models, so that their ratio is one.
    """
    scale, tenth = latent.head_dim**-0.5, keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    if not tenth or keys.value("rope.scaling.type", "none") != "yarn":
        return turn, scale
    factor = keys.number("rope.scaling.factor")
    turn = dataclasses.replace(turn, attention_factor=keys.number("rope.scaling.attn_factor", 1.0))
    return turn, scale * yarn_mscale(factor, 10 * tenth) ** 2


_HF = LatentNaming(**vars(hf_naming(_HF_NAMES)), layer_prefix="model.layers.{layer}.")
_GGUF = LatentNaming(
    **vars(gguf_naming(_GGUF_NAMES)), fused=_GGUF_FUSED, layer_prefix="blk.{layer}."
)
DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    model_types=("deepseek_v2",),
    architecture="deepseek2",
    hf=_HF,
    gguf=_GGUF,
    from_json=v2,
    from_keys=of_keys,
)
#: Its GGUF files say DeepSeek 2 too.
DEEPSEEK_V3 = Family(
    name="deepseek_v3", model_types=("deepseek_v3",), hf=_HF, gguf=_GGUF, from_json=v3
)
