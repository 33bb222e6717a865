"""The tokenizer that a GGUF file describes, from the file's metadata."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from ..errors import StokerError
from .base import Tokenizer, TokenType, Vocabulary
from .bpe import PRE_TOKENIZERS, BpeTokenizer, byte_letters
from .spm import SpmTokenizer

_MODELS = ("gpt2", "llama")
_T = TypeVar("_T")
# Spellings by which files without the keys can be told to have such a token.
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
_END_OF_MESSAGE = ("<|eom_id|>",)
# What ends a reply of GPT-OSS (the harmony format), where `<|end|>` only ends one of its messages.
_HARMONY_ENDS, _HARMONY_MESSAGE_END = ("<|return|>", "<|call|>"), "<|end|>"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer that the `tokenizer.*` keys of a GGUF file describe.

    `tokenizer.ggml.model` may be `gpt2` (byte-level BPE, cut into words by the rule that
    `tokenizer.ggml.pre` names) or `llama` (SentencePiece BPE). Where keys are missing, the
    defaults are llama.cpp's: BOS is added for `llama` and for Llama 3's rule, EOS never; the ids
    of BOS, EOS and unknown are 1, 2 and 0 for `llama`, and none for `gpt2`. End-of-turn and
    end-of-message tokens that no key names are known by their spelling.
    `tokenizer.ggml.add_space_prefix` has a meaning for `llama` only.

    Args:
      metadata: keys to plain Python values (str, int, float, bool, list).

    Raises:
      StokerError: a key is missing, of the wrong type or length, out of range, or names
        something that is not supported.
    """
    model = _need(metadata, "model", str)
    if model not in _MODELS:
        raise StokerError(
            f"tokenizer.ggml.model is '{model}', which is not supported; use a model with one of: "
            f"{', '.join(_MODELS)}"
        )
    tokens = tuple(_strings(metadata, "tokens"))
    if not tokens:
        raise StokerError("tokenizer.ggml.tokens is empty; convert the model again")
    if model == "llama":
        return _spm(metadata, tokens)
    return _bpe(metadata, tokens)


def _bpe(metadata: Mapping[str, Any], tokens: tuple[str, ...]) -> Tokenizer:
    pre = _need(metadata, "pre", str)
    rule = PRE_TOKENIZERS.get(pre)
    if rule is None:
        raise StokerError(
            f"tokenizer.ggml.pre is '{pre}', which is not supported; use a model with one of: "
            f"{', '.join(PRE_TOKENIZERS)}"
        )
    types = _types(metadata, tokens)
    merges = []
    for rank, merge in enumerate(_strings(metadata, "merges")):
        left, gap, right = merge.partition(" ")
        if not (left and gap and right) or " " in right:
            raise StokerError(
                f"tokenizer.ggml.merges entry {rank} is '{merge}', not two pieces with a space "
                "between them; convert the model again"
            )
        merges.append((left, right))
    vocabulary = _vocabulary(metadata, tokens, types, bos=None, eos=None, add_bos=rule.add_bos)
    if set(tokens).isdisjoint(byte_letters()[0x20:0x7F]):
        raise StokerError(
            "tokenizer.ggml.tokens has no token for any ASCII character, so it is not a byte-level "
            "vocabulary; convert the model again"
        )
    return BpeTokenizer(vocabulary, merges, rule)


def _spm(metadata: Mapping[str, Any], tokens: tuple[str, ...]) -> Tokenizer:
    types = _types(metadata, tokens)
    scores = _need(metadata, "scores", list)
    _same_length("scores", scores, tokens)
    for i, score in enumerate(scores):
        if type(score) not in (int, float):
            raise StokerError(f"tokenizer.ggml.scores entry {i} is {score!r}, not a number")
    vocabulary = _vocabulary(metadata, tokens, types, bos=1, eos=2, add_bos=True)
    prefix = _get(metadata, "add_space_prefix", bool, True)
    return SpmTokenizer(vocabulary, scores, prefix)


def _vocabulary(
    metadata: Mapping[str, Any],
    tokens: tuple[str, ...],
    types: tuple[TokenType, ...],
    *,
    bos: int | None,
    eos: int | None,
    add_bos: bool,
) -> Vocabulary:
    control = {
        token: i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind is TokenType.CONTROL
    }
    bos_id = _id(metadata, "bos", tokens, bos)
    eos_id = _id(metadata, "eos", tokens, eos)
    eot_id = _id(metadata, "eot", tokens, _first(control, _END_OF_TURN))
    eom_id = _id(metadata, "eom", tokens, _first(control, _END_OF_MESSAGE))
    stop_ids = {eos_id, eot_id, eom_id}
    if all(token in control for token in _HARMONY_ENDS):
        stop_ids |= {control[token] for token in _HARMONY_ENDS}
        stop_ids -= {control.get(_HARMONY_MESSAGE_END)}
    flags = {}
    for name, token_id, default in (("bos", bos_id, add_bos), ("eos", eos_id, False)):
        flags[name] = _get(metadata, f"add_{name}_token", bool, default)
        if token_id is None and flags[name]:
            if f"tokenizer.ggml.add_{name}_token" in metadata:
                raise StokerError(
                    f"tokenizer.ggml.add_{name}_token is true but there is no "
                    f"tokenizer.ggml.{name}_token_id; convert the model again"
                )
            flags[name] = False
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        template = _checked("tokenizer.chat_template", template, str)
    return Vocabulary(
        tokens=tokens,
        types=types,
        bos_id=bos_id,
        eos_id=eos_id,
        stop_ids=frozenset(i for i in stop_ids if i is not None),
        add_bos=flags["bos"],
        add_eos=flags["eos"],
        chat_template=template,
        template_source="" if template is None else "tokenizer.chat_template",
    )


def _first(ids: Mapping[str, int], spellings: tuple[str, ...]) -> int | None:
    return next((ids[token] for token in spellings if token in ids), None)


def _types(metadata: Mapping[str, Any], tokens: tuple[str, ...]) -> tuple[TokenType, ...]:
    """Types of the tokens (all normal without the key), checked against their spellings."""
    numbers = _get(metadata, "token_type", list, [TokenType.NORMAL] * len(tokens))
    _same_length("token_type", numbers, tokens)
    kinds = {int(kind): kind for kind in TokenType}
    seen: dict[str, int] = {}
    types = []
    for i, (token, number) in enumerate(zip(tokens, numbers, strict=True)):
        kind = kinds.get(number) if isinstance(number, int) else None
        if kind is None:
            raise StokerError(
                f"tokenizer.ggml.token_type entry {i} is {number!r}; it must be one of "
                f"{', '.join(f'{int(k)} ({k.name})' for k in TokenType)}"
            )
        if kind is TokenType.BYTE and not _BYTE_TOKEN.fullmatch(token):
            raise StokerError(
                f"tokenizer.ggml.token_type entry {i} is BYTE but the token is '{token}'; it must "
                "be spelt <0x00> to <0xFF>"
            )
        if not token:
            kind = TokenType.UNUSED
        elif seen.setdefault(token, i) != i:
            raise StokerError(
                f"tokenizer.ggml.tokens has '{token}' twice, as {seen[token]} and {i}; convert the "
                "model again"
            )
        types.append(kind)
    return tuple(types)


def _id(
    metadata: Mapping[str, Any], name: str, tokens: tuple[str, ...], default: int | None
) -> int | None:
    key = f"{name}_token_id"
    if f"tokenizer.ggml.{key}" not in metadata:
        return default if default is not None and default < len(tokens) else None
    value = _need(metadata, key, int)
    if not 0 <= value < len(tokens):
        raise StokerError(
            f"tokenizer.ggml.{key} is {value}, outside the vocabulary of {len(tokens)} tokens; "
            "convert the model again"
        )
    return value


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    values = _need(metadata, name, list)
    for i, value in enumerate(values):
        if not isinstance(value, str):
            raise StokerError(
                f"tokenizer.ggml.{name} entry {i} is of type {type(value).__name__}, not str; "
                "convert the model again"
            )
    return values


def _same_length(name: str, values: list[Any], tokens: tuple[str, ...]) -> None:
    if len(values) != len(tokens):
        raise StokerError(
            f"tokenizer.ggml.{name} has {len(values)} entries for {len(tokens)} tokens; convert "
            "the model again"
        )


def _need(metadata: Mapping[str, Any], name: str, kind: type[_T]) -> _T:
    key = f"tokenizer.ggml.{name}"
    if key not in metadata:
        raise StokerError(f"the file has no {key}; convert the model again with its tokenizer")
    return _checked(key, metadata[key], kind)


def _get(metadata: Mapping[str, Any], name: str, kind: type[_T], default: _T) -> _T:
    key = f"tokenizer.ggml.{name}"
    return _checked(key, metadata[key], kind) if key in metadata else default


def _checked(key: str, value: Any, kind: type[_T]) -> _T:
    # Not isinstance: a bool must not pass for an int.
    if type(value) is not kind:
        raise StokerError(
            f"{key} is of type {type(value).__name__}, not {kind.__name__}; convert the model again"
        )
    return value
