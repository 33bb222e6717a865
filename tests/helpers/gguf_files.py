"""Tiny GGUF files, written with the `gguf` package the way llama.cpp's converter does."""

from __future__ import annotations

import dataclasses
import pathlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import gguf
import numpy as np
from gguf import GGUFValueType as ValueType


@dataclasses.dataclass(frozen=True)
class Tiny:
    """Sizes of a tiny decoder: T-LLAMA unless told otherwise."""

    architecture: str = "llama"
    vocab_size: int = 512
    d_model: int = 64
    n_layers: int = 2
    n_heads: int = 8
    n_kv_heads: int = 2
    head_dim: int = 8
    d_ff: int = 160
    max_positions: int = 256
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    biases: bool = False
    tied: bool = False

    def metadata(self) -> dict[str, Any]:
        """What the converter writes about the architecture."""
        arch = self.architecture
        return {
            "general.name": "tiny",
            f"{arch}.block_count": self.n_layers,
            f"{arch}.context_length": self.max_positions,
            f"{arch}.embedding_length": self.d_model,
            f"{arch}.feed_forward_length": self.d_ff,
            f"{arch}.attention.head_count": self.n_heads,
            f"{arch}.attention.head_count_kv": self.n_kv_heads,
            f"{arch}.attention.key_length": self.head_dim,
            f"{arch}.attention.value_length": self.head_dim,
            f"{arch}.attention.layer_norm_rms_epsilon": self.norm_eps,
            f"{arch}.rope.freq_base": self.rope_theta,
            f"{arch}.rope.dimension_count": self.head_dim,
            f"{arch}.vocab_size": self.vocab_size,
        }


def hf_weights(tiny: Tiny, seed: int = 0, std: float = 0.3) -> dict[str, np.ndarray]:
    """Random float32 weights under the names and in the row order of Hugging Face."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.normal(0, std, (rows, columns)).astype(np.float32)

    q, kv = tiny.n_heads * tiny.head_dim, tiny.n_kv_heads * tiny.head_dim
    weights = {"model.embed_tokens.weight": matrix(tiny.vocab_size, tiny.d_model)}
    for layer in range(tiny.n_layers):
        at = f"model.layers.{layer}"
        weights |= {
            f"{at}.input_layernorm.weight": 1 + matrix(1, tiny.d_model)[0],
            f"{at}.self_attn.q_proj.weight": matrix(q, tiny.d_model),
            f"{at}.self_attn.k_proj.weight": matrix(kv, tiny.d_model),
            f"{at}.self_attn.v_proj.weight": matrix(kv, tiny.d_model),
            f"{at}.self_attn.o_proj.weight": matrix(tiny.d_model, q),
            f"{at}.post_attention_layernorm.weight": 1 + matrix(1, tiny.d_model)[0],
            f"{at}.mlp.gate_proj.weight": matrix(tiny.d_ff, tiny.d_model),
            f"{at}.mlp.up_proj.weight": matrix(tiny.d_ff, tiny.d_model),
            f"{at}.mlp.down_proj.weight": matrix(tiny.d_model, tiny.d_ff),
        }
        if tiny.biases:
            for part, width in (("q", q), ("k", kv), ("v", kv)):
                bias = rng.normal(0, 1, width).astype(np.float32)
                weights[f"{at}.self_attn.{part}_proj.bias"] = bias
    weights["model.norm.weight"] = 1 + matrix(1, tiny.d_model)[0]
    if not tiny.tied:
        weights["lm_head.weight"] = matrix(tiny.vocab_size, tiny.d_model)
    return weights


#: Ends of Hugging Face names and of GGUF names.
_RENAMED = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face parameter."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{_RENAMED[rest]}.{kind}"
    return f"{_RENAMED[stem]}.{kind}"


def gguf_tensors(tiny: Tiny, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Float32 tensors by GGUF name; Llama's Q and K rows permuted as the converter does."""
    tensors = {}
    for name, weight in weights.items():
        for part, heads in (("q_proj", tiny.n_heads), ("k_proj", tiny.n_kv_heads)):
            if tiny.architecture == "llama" and part in name:
                halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
                weight = halves.swapaxes(1, 2).reshape(weight.shape)
        tensors[gguf_name(name)] = np.ascontiguousarray(weight)
    return tensors


def byte_vocabulary(size: int) -> dict[str, Any]:
    """Metadata of a byte-level BPE vocabulary of `size` tokens, two merges and two specials."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    alphabet = [chr(byte if byte in printable else next(spare)) for byte in range(256)]
    tokens = ["<|begin|>", "<|end|>", *alphabet, "th", "the"]
    types = [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * 258
    unused = [f"<|unused{index}|>" for index in range(size - len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens + unused,
        "tokenizer.ggml.token_type": [
            *map(int, types),
            *[int(gguf.TokenType.UNUSED)] * len(unused),
        ],
        "tokenizer.ggml.merges": ["t h", "th e"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
    }


def write_gguf(
    path: pathlib.Path,
    tiny: Tiny,
    weights: Mapping[str, np.ndarray] | None = None,
    *,
    quantisation: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
    shard_tensors: int = 0,
    big_endian: bool = False,
) -> pathlib.Path:
    """Writes a model; returns its path (of a split one: the first shard).

    Args:
      path: of the whole file.
      tiny: sizes and architecture.
      weights: as `hf_weights` makes them.
      quantisation: of the matrices; vectors stay F32.
      metadata: keys to add or change, or to leave out (None).
      tensors: GGUF tensors to add or change, or to leave out (None); float32.
      shard_tensors: tensors in a shard, 0 for one file.
      big_endian: byte order of the file.
    """
    order = gguf.GGUFEndian.BIG if big_endian else gguf.GGUFEndian.LITTLE
    writer = gguf.GGUFWriter(
        path, tiny.architecture, endianess=order, split_max_tensors=shard_tensors
    )
    entries = {**tiny.metadata(), **byte_vocabulary(tiny.vocab_size), **(metadata or {})}
    for key, value in entries.items():
        if value is not None:
            writer.add_key_value(key, value, _value_type(value), _element_type(value))
    weights = hf_weights(tiny) if weights is None else weights
    for name, tensor in {**gguf_tensors(tiny, weights), **(tensors or {})}.items():
        if tensor is None:
            continue
        kind = gguf.GGMLQuantizationType[quantisation if tensor.ndim > 1 else "F32"]
        if kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))[0] if shard_tensors else path


def _value_type(value: Any) -> ValueType:
    kinds = {bool: ValueType.BOOL, int: ValueType.UINT32, float: ValueType.FLOAT32}
    return kinds.get(type(value)) or ValueType.get_type(value)


def _element_type(value: Any) -> ValueType | None:
    return None if not isinstance(value, list) or not value else ValueType.get_type(value[0])


def text(value: str | bytes) -> bytes:
    """A GGUF string."""
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def entry(key: str | bytes, kind: int, payload: bytes) -> bytes:
    """A metadata entry with any payload."""
    return text(key) + struct.pack("<I", kind) + payload


def tensor_entry(
    name: str, dims: Sequence[int], kind: int = 0, offset: int = 0, rank: int | None = None
) -> bytes:
    """A tensor's entry; `dims` in the file's order."""
    rank = len(dims) if rank is None else rank
    return (
        text(name)
        + struct.pack("<I", rank)
        + struct.pack(f"<{len(dims)}Q", *dims)
        + struct.pack("<IQ", kind, offset)
    )


def raw_gguf(
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: int = 0,
    *,
    version: int = 3,
    entry_count: int | None = None,
    tensor_count: int | None = None,
) -> bytes:
    """A file of just these parts, however absurd, and `data` zero bytes of tensors."""
    header = b"GGUF" + struct.pack(
        "<IQQ",
        version,
        len(tensors) if tensor_count is None else tensor_count,
        len(entries) if entry_count is None else entry_count,
    )
    body = header + b"".join(entries) + b"".join(tensors)
    return body + bytes(-len(body) % 32 + data)
