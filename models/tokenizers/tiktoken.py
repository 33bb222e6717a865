"""Tokenizers in files of the kind that the tiktoken library reads: a token and its rank to a line.

Tokens are bytes in base64, and their rank is their id. What such a file does not say, how text is
cut into words and which special tokens follow, is known here for the two that models come with.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import pathlib
import re
from collections.abc import Mapping

from ..errors import StokerError
from .base import TokenType
from .bpe import PRE_TOKENIZERS, PreTokenizer, byte_letters

_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
#: Bytes of a first line, at most.
_FIRST = 4096


@dataclasses.dataclass(frozen=True)
class Convention:
    """What goes with a file of ranks.

    Attributes:
      rule: how text is cut into words.
      special: tokens whose ids follow the last rank, in order.
      begin: spelling of the token that begins a sequence.
      adds_begin: `encode` puts it first.
      end: spelling of the token that ends a sequence.
      stops: spellings of the tokens that end a reply.
    """

    rule: PreTokenizer
    special: tuple[str, ...]
    begin: str
    adds_begin: bool
    end: str
    stops: tuple[str, ...]


def _llama3() -> Convention:
    """Llama 3 (`llama_models/llama3/tokenizer.py` of Meta, with the names of 3.1)."""
    reserved = [f"<|reserved_special_token_{number}|>" for number in range(248)]
    special = (
        *("<|begin_of_text|>", "<|end_of_text|>", *reserved[:2], "<|finetune_right_pad_id|>"),
        *(reserved[2], "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"),
        *("<|python_tag|>", *reserved[3:]),
    )
    stops = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
    rule = PRE_TOKENIZERS["llama-bpe"]
    return Convention(rule, special, "<|begin_of_text|>", True, "<|end_of_text|>", stops)


def _harmony() -> Convention:
    """GPT-OSS (`o200k_harmony` of the tiktoken library)."""
    named = {
        0: "<|startoftext|>",
        1: "<|endoftext|>",
        4: "<|return|>",
        5: "<|constrain|>",
        7: "<|channel|>",
        8: "<|start|>",
        9: "<|end|>",
        10: "<|message|>",
        14: "<|call|>",
        20: "<|endofprompt|>",
    }
    special = tuple(named.get(i, f"<|reserved_{199_998 + i}|>") for i in range(1090))
    stops = ("<|return|>", "<|call|>", "<|endoftext|>")
    rule = dataclasses.replace(PRE_TOKENIZERS["gpt-4o"], ignore_merges=True)
    return Convention(rule, special, "<|startoftext|>", False, "<|return|>", stops)


def convention_of(path: pathlib.Path) -> Convention:
    """What goes with a file, by its name; StokerError where that is not known."""
    if path.name == "tokenizer.model":
        return _llama3()
    if path.name in ("o200k_base.tiktoken", "o200k_harmony.tiktoken"):
        return _harmony()
    raise StokerError(
        f"'{path}' does not say how text is cut into words, and no model that is known has it; add "
        "the model's tokenizer.json"
    )


def is_tiktoken(path: pathlib.Path) -> bool:
    """Whether a file is of this kind, whatever it is called."""
    try:
        with open(path, "rb") as file:
            return _LINE.match(file.read(_FIRST)) is not None
    except OSError:
        return False


def read_ranks(path: pathlib.Path) -> dict[bytes, int]:
    """Tokens and their ranks, which are 0, 1, 2 and so on.

    Raises:
      StokerError: a line is malformed, or a token or rank is missing or there twice.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise StokerError(f"'{path}' cannot be read ({error.strerror or error})") from None
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        token, _, rank = line.partition(b" ")
        try:
            spelt = base64.b64decode(token, validate=True)
        except binascii.Error:
            spelt = b""
        if not spelt or spelt in ranks or rank != str(len(ranks)).encode():
            raise StokerError(
                f"line {number} of '{path}' is {line!r:.60}, not a new token in base64 and the "
                f"rank {len(ranks)}; download it again"
            )
        ranks[spelt] = len(ranks)
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise StokerError(f"'{path}' has no token for some byte; download it again")
    return ranks


def merges_of(ranks: Mapping[bytes, int]) -> list[tuple[str, str]]:
    """Merges, in byte letters, that give what merging by the ranks of results gives.

    tiktoken merges whichever neighbours make the token of the lowest rank; so all pairs that make
    a token are merges, in the order of what they make. Of several such pairs those of lower ranks
    come first.
    """
    letters = byte_letters()

    def spell(piece: bytes) -> str:
        return "".join(letters[byte] for byte in piece)

    merges: list[tuple[str, str]] = []
    # Ranks ascend in the mapping.
    for token in ranks:
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        fitting = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        fitting.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(spell(left), spell(right)) for left, right in fitting]
    return merges


def pieces_of(
    ranks: Mapping[bytes, int], special: Mapping[int, str]
) -> tuple[list[str], list[TokenType]]:
    """Spelling and type of each token id; `special` are those after the ranks, by id."""
    letters = byte_letters()
    tokens = ["".join(letters[byte] for byte in token) for token in ranks]
    types = [TokenType.NORMAL] * len(tokens)
    for token_id in range(len(ranks), max(special, default=-1) + 1):
        tokens.append(special.get(token_id, ""))
        types.append(TokenType.CONTROL if token_id in special else TokenType.UNUSED)
    return tokens, types
