"""Byte-level byte-pair encoding (GPT-2 and its descendants)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from ..errors import StokerError
from .base import Tokenizer, TokenType, Vocabulary

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# Words may begin with capitals, and keep their contraction (o200k_base of tiktoken).
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclasses.dataclass(frozen=True)
class PreTokenizer:
    """How text is cut into words before merging, and what else goes with that rule.

    Attributes:
      splits: regular expressions, applied one after another; matches and the text between
        them are cut apart.
      nfc: text is composed (Unicode NFC) first.
      ignore_merges: a word that is a token is that token, whatever the merges say.
      add_bos: the default of `tokenizer.ggml.add_bos_token`.
    """

    splits: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)

# Values of `tokenizer.ggml.pre`. The rules are those of the models' own tokenizer.json files;
# `default` is a rule of the GGUF format's reference reader, for files made before rules had names.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer(
        (r"[\p{P}\$\+<=>\^~\|]+", _GPT2.removesuffix(r"|\s+"), r"\p{N}+", r"[0-9][0-9][0-9]")
    ),
    "gpt-2": PreTokenizer((_GPT2,)),
    "phi-2": PreTokenizer((_GPT2,)),
    "llama-bpe": _LLAMA,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "dbrx": PreTokenizer((_LLAMA3,)),
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "gpt-4o": PreTokenizer((_O200K,)),
    "qwen2": PreTokenizer((_QWEN2,), nfc=True),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
}


@functools.cache
def byte_letters() -> tuple[str, ...]:
    """The printable letter that stands for each of the 256 bytes (GPT-2, `bytes_to_unicode`).

    Bytes that print in Latin-1 stand for themselves; the others take U+0100 upwards in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


class BpeTokenizer(Tokenizer):
    """Byte-level BPE, merged by the `tokenizers` library.

    A byte whose letter the vocabulary lacks cannot be encoded and is left out, as in the
    library itself (SmolLM2 lacks 21 bytes, most of which no UTF-8 text has).

    Args:
      vocabulary: the tokens, spelt in byte letters.
      merges: pairs of token spellings, most important first.
      rule: how text is cut into words.

    Raises:
      StokerError: a merge names or makes a piece that is not a token.
    """

    def __init__(
        self, vocabulary: Vocabulary, merges: Sequence[tuple[str, str]], rule: PreTokenizer
    ) -> None:
        super().__init__(vocabulary)
        # Control tokens are found by the base class, never made by merging.
        mergeable = (TokenType.NORMAL, TokenType.USER_DEFINED)
        vocab = {
            token: i
            for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
            if kind in mergeable
        }
        for rank, (left, right) in enumerate(merges):
            for piece in (left, right, left + right):
                if piece not in vocab:
                    raise StokerError(
                        f"tokenizer.ggml.merges entry {rank} ('{left} {right}') needs the token "
                        f"'{piece}', which is not in tokenizer.ggml.tokens; convert the model again"
                    )
        engine = tokenizers.Tokenizer(
            models.BPE(vocab=vocab, merges=list(merges), ignore_merges=rule.ignore_merges)
        )
        if rule.nfc:
            engine.normalizer = normalizers.NFC()
        engine.pre_tokenizer = _pre_tokenizer(rule)
        self._engine = engine
        self._bytes_of = {letter: byte for byte, letter in enumerate(byte_letters())}

    def _encode_run(self, text: str) -> list[int]:
        ids: list[int] = self._engine.encode(text, add_special_tokens=False).ids
        return ids

    def _piece_bytes(self, piece: str) -> bytes:
        try:
            return bytes([self._bytes_of[letter] for letter in piece])
        except KeyError:
            # Not written in byte letters: an added token that its file calls normal.
            return piece.encode("utf-8", errors="replace")


def _pre_tokenizer(rule: PreTokenizer) -> Any:
    splits = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
        for pattern in rule.splits
    ]
    to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, to_letters])
