"""What may be asked: prompts to token ids, and requests that can never be answered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..models.errors import StokerError
from ..models.tokenizers import Tokenizer
from .sampling_params import SamplingParams

#: Text, or token ids.
Prompt = str | Sequence[int]


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    """Token ids of a prompt: text gets the model's begin token, ids are taken as they are.

    Raises:
      StokerError: for text where there is no tokenizer, or ids that are no whole numbers.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise StokerError("this model has no tokenizer; give the prompt as token ids")
        return tokenizer.encode(prompt)
    if not isinstance(prompt, Iterable):
        raise StokerError(f"the prompt is {prompt!r:.40}; it must be text, or a list of token ids")
    ids = list(prompt)
    for token in ids:
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise StokerError(f"the prompt holds {token!r}; it takes text, or whole numbers")
    return [int(token) for token in ids]


def reply_limit(
    ids: Sequence[int],
    params: SamplingParams,
    *,
    vocab_size: int,
    context: int,
    tokenizer: Tokenizer | None,
) -> int:
    """Most tokens that may follow a prompt.

    Raises:
      StokerError: for a request that can never be answered.
    """
    if not ids:
        raise StokerError("the prompt is empty; give at least one token")
    for token in ids:
        if not 0 <= token < vocab_size:
            raise StokerError(f"token id {token} is not in the vocabulary of {vocab_size}")
    room = context - len(ids)
    if room < (params.max_tokens != 0):
        raise StokerError(
            f"the prompt has {len(ids)} tokens, but the context holds {context}, reply included; "
            "shorten the prompt"
        )
    params.check(vocab_size)
    if params.stop and tokenizer is None:
        raise StokerError("stop strings need a tokenizer, which this model lacks; use stop_ids")
    limit = room if params.max_tokens is None else min(params.max_tokens, room)
    if params.min_tokens > limit:
        raise StokerError(
            f"min_tokens is {params.min_tokens}, but after {len(ids)} prompt tokens the context of "
            f"{context} leaves {limit}"
        )
    return limit
