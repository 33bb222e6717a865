"""T-CHAIN: a model whose greedy text is known in advance, one token after the other."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from gguf_files import byte_vocabulary
from tiny import tiny_model

from stoker.models.config import Kernels, ModelConfig, Rope
from stoker.models.loading import Model
from stoker.models.parameters import init_params
from stoker.models.tokenizers import Tokenizer, tokenizer_from_gguf

#: Tokens: the bytes' printable stand-ins follow the two specials.
VOCABULARY = 264
CONFIG = ModelConfig(
    family="llama",
    vocab_size=VOCABULARY,
    d_model=VOCABULARY,
    n_layers=1,
    n_heads=2,
    n_kv_heads=1,
    head_dim=8,
    d_ff=16,
    max_positions=256,
    norm_eps=1e-5,
    rope=Rope(theta=10000.0, dims=8),
    kernels=Kernels("cpu", "float32"),
)


def tokenizer() -> Tokenizer:
    """A byte-level tokenizer: one token for each ASCII character."""
    keys = {"tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.add_bos_token": False}
    return tokenizer_from_gguf(byte_vocabulary(VOCABULARY) | keys)


def chain_model(text: str) -> Model:
    """After each character of `text` comes the next one, and after the last an end token.

    Characters must be distinct; any other token is followed by itself.
    """
    speech = tokenizer()
    params = init_params(CONFIG, jax.random.key(0))
    for layer in params["layers"]:
        layer["o"], layer["down"] = jnp.zeros_like(layer["o"]), jnp.zeros_like(layer["down"])
    successor = list(range(VOCABULARY))
    ids = [*speech.encode(text), 1]
    assert len(set(ids)) == len(ids) == len(text) + 1
    for token, following in itertools.pairwise(ids):
        successor[token] = following
    head = np.zeros((VOCABULARY, VOCABULARY), np.float32)
    head[successor, np.arange(VOCABULARY)] = 4
    params["embedding"] = jnp.eye(VOCABULARY)
    params["head"] = jnp.asarray(head)
    params["final_norm"] = jnp.ones(VOCABULARY)
    return tiny_model(CONFIG, params, speech)
