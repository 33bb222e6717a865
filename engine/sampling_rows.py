"""The sampling parameters of all slots: one fixed structure, packed on the host."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..models.errors import StokerError
from ..models.ops.sampling import WORD, Sampling
from .sampling_params import MAX_BIAS, MAX_BIASES, MAX_COUNT, MAX_SEED, SamplingParams

#: Below this temperature, drawing is indistinguishable from taking the best token, and is done so.
GREEDY_BELOW = 1e-5
MAX_END_IDS = 16


def pack_sampling(
    requests: Sequence[SamplingParams],
    vocab_size: int,
    prompt_lens: Sequence[int] | None = None,
    end_ids: Sequence[int] = (),
) -> Sampling:
    """The rows of `Sampling` for `requests`, as NumPy arrays; draws a seed where one has none.

    Args:
      requests: one for each row.
      vocab_size: V.
      prompt_lens: tokens of each request's prompt; None for 0.
      end_ids: the model's end tokens, which `min_tokens` holds back.

    Raises:
      StokerError: for token ids outside the vocabulary, or more than `MAX_END_IDS` end tokens.
    """
    if len(set(end_ids)) > MAX_END_IDS:
        raise StokerError(
            f"the model has {len(set(end_ids))} end tokens; at most {MAX_END_IDS} are supported"
        )
    if any(not 0 <= token < vocab_size for token in end_ids):
        raise StokerError(
            f"the end tokens {list(end_ids)} are not all in the vocabulary of {vocab_size}"
        )
    rows = len(requests)
    lens = [0] * rows if prompt_lens is None else [int(length) for length in prompt_lens]
    closed = [length + request.min_tokens for length, request in zip(lens, requests, strict=True)]
    packed: dict[str, Any] = {
        "temperature": np.array([_temperature(request) for request in requests], np.float32),
        "top_k": np.array([max(request.top_k, 0) for request in requests], np.int32),
        "top_p": np.array([request.top_p for request in requests], np.float32),
        "min_p": np.array([request.min_p for request in requests], np.float32),
        "key": np.array([_key(request) for request in requests], np.uint32).reshape(rows, 2),
        "repetition": np.array([request.repetition_penalty for request in requests], np.float32),
        "presence": np.array([request.presence_penalty for request in requests], np.float32),
        "frequency": np.array([request.frequency_penalty for request in requests], np.float32),
        "bias_ids": np.full((rows, MAX_BIASES), -1, np.int32),
        "bias_values": np.zeros((rows, MAX_BIASES), np.float32),
        "allowed": np.zeros((rows, -(-vocab_size // WORD)), np.uint32),
        "has_mask": np.zeros(rows, bool),
        "end_ids": np.full((rows, MAX_END_IDS), -1, np.int32),
        "min_lens": np.array([min(length, MAX_COUNT) for length in closed], np.int32),
        "prompt_lens": np.array(lens, np.int32),
        "wants_top": np.array([bool(request.logprobs) for request in requests], bool),
    }
    for row, request in enumerate(requests):
        mask = request.check(vocab_size)
        bits = np.packbits(mask, bitorder="little")
        packed["allowed"][row].view(np.uint8)[: len(bits)] = bits
        packed["has_mask"][row] = not mask.all()
        added = [pair for pair in request.biases if abs(pair[1]) < MAX_BIAS]
        if added:
            packed["bias_ids"][row, : len(added)] = [token for token, _ in added]
            packed["bias_values"][row, : len(added)] = [value for _, value in added]
        held = sorted(set(end_ids) - set(request.stop_ids))
        packed["end_ids"][row, : len(held)] = held
    return Sampling(**packed)


def pack_ends(requests: Sequence[SamplingParams], end_ids: Sequence[int]) -> np.ndarray:
    """int32 `[rows, MAX_END_IDS]`: tokens that end each request's reply, padded with -1.

    Of more only so many: the host finds the others.
    """
    packed = np.full((len(requests), MAX_END_IDS), -1, np.int32)
    for row, request in enumerate(requests):
        own = () if request.ignore_eos else end_ids
        ends = [*own, *request.stop_ids][:MAX_END_IDS]
        packed[row, : len(ends)] = ends
    return packed


def idle_sampling(rows: int, vocab_size: int) -> Sampling:
    """Rows of `Sampling` that ask for nothing, for slots without a request."""
    return pack_sampling([SamplingParams(seed=0)] * rows, vocab_size)


def _temperature(request: SamplingParams) -> float:
    """0 where only the best token can be drawn: then it is taken, even among equals."""
    narrow = request.top_k == 1 or request.top_p == 0 or request.min_p == 1
    return 0.0 if narrow or request.temperature < GREEDY_BELOW else request.temperature


def _key(request: SamplingParams) -> tuple[int, int]:
    seed = secrets.randbelow(MAX_SEED) if request.seed is None else request.seed
    return seed >> 32, seed & 0xFFFFFFFF
