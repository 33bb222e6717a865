"""Small vocabularies, trained here, and a plain byte-level BPE to compare with."""

from __future__ import annotations

import functools
import io
import itertools
import json
import pathlib
from typing import Any

import regex
import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2 as proto
from tokenizers import models, normalizers, pre_tokenizers, trainers

DATA = pathlib.Path(__file__).parents[1] / "data"

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PROSE = """The tokenizer's job isn't glamorous: it cuts 1234567 characters into pieces.
We've seen that they'll merge "the" and "ing" first, I'm sure; don't you think?
def add(first, second):\n    return first + second  # 12 + 345 = 357\n
Höher, weiter, schneller — así es la vida, n'est-ce pas? Привет, мир! 你好世界 你好 日本語 日本
नमस्ते दुनिया مرحبا بالعالم\r\n\r\n  trailing spaces   \n\n\ttabs\tand  double  spaces 😀😀
"""


@functools.cache
def corpus() -> tuple[str, ...]:
    """More than 200 varied texts."""
    return tuple(json.loads((DATA / "smollm2_ids.json").read_text())["texts"])


def training_texts() -> list[str]:
    return [PROSE] * 20 + list(corpus())


def published_tokenizer(pre: str) -> tokenizers.Tokenizer:
    """Hugging Face's configuration of the rule, as the models' tokenizer.json files have it."""
    engine = tokenizers.Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    if pre == "gpt-2":
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    elif pre == "smollm":
        engine.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    else:
        pattern = {"llama-bpe": LLAMA3, "dbrx": LLAMA3, "qwen2": QWEN2, "gpt-4o": O200K}[pre]
        engine.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    if pre == "qwen2":
        engine.normalizer = normalizers.NFC()
    return engine


@functools.cache
def bpe(pre: str) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """A trained tokenizer and the metadata that a converter would write for it.

    Behind the trained tokens come three control tokens, a user-defined and an unused one.
    """
    engine = published_tokenizer(pre)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    engine.train_from_iterator(training_texts(), trainer)
    model = json.loads(engine.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    size = len(tokens)
    extra = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "[PAD0]"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, *extra],
        "tokenizer.ggml.token_type": [1] * size + [3, 3, 3, 4, 5],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": size,
        "tokenizer.ggml.eos_token_id": size + 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    }
    return engine, metadata


@functools.cache
def spm(add_space_prefix: bool = True) -> tuple[Any, dict[str, Any]]:
    """A trained sentencepiece model and the metadata that a converter would write for it.

    Behind the trained pieces come a control token <m> and a user-defined token <u>.
    """
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(PROSE.split("\n") * 20 + [t for t in corpus() if "\n" not in t]),
        model_writer=written,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=add_space_prefix,
        minloglevel=2,
    )
    model = proto.ModelProto.FromString(written.getvalue())
    # The file format numbers types as sentencepiece does.
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece.piece for piece in model.pieces] + ["<m>", "<u>"],
        "tokenizer.ggml.scores": [piece.score for piece in model.pieces] + [-1000.0, -1000.0],
        "tokenizer.ggml.token_type": [int(piece.type) for piece in model.pieces] + [3, 4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    if not add_space_prefix:
        metadata["tokenizer.ggml.add_space_prefix"] = False
    processor = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    return processor, metadata


class PlainBpe:
    """Byte-level BPE in a few plain lines: words by regular expressions, then merges by rank."""

    def __init__(self, metadata: dict[str, Any], patterns: list[str]) -> None:
        self.ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
        merges = metadata["tokenizer.ggml.merges"]
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self.whole_words = metadata["tokenizer.ggml.pre"] == "llama-bpe"
        self.patterns = [regex.compile(pattern) for pattern in patterns]
        spare = 0x100
        self.letters = []
        for byte in range(256):
            printable = chr(byte).isprintable() and byte not in (0x20, 0xA0, 0xAD)
            self.letters.append(chr(byte if printable else spare))
            spare += not printable

    def encode(self, text: str) -> list[int]:
        words = [text]
        for pattern in self.patterns:
            words = [piece for word in words for piece in cut(pattern, word)]
        return [token_id for word in words for token_id in self.encode_word(word)]

    def encode_word(self, word: str) -> list[int]:
        pieces = [self.letters[byte] for byte in word.encode()]
        if self.whole_words and "".join(pieces) in self.ids:
            return [self.ids["".join(pieces)]]
        while True:
            pairs = [p for p in itertools.pairwise(pieces) if p in self.ranks]
            if not pairs:
                return [self.ids[piece] for piece in pieces]
            left, right = min(pairs, key=self.ranks.__getitem__)
            at = next(
                i for i, pair in enumerate(itertools.pairwise(pieces)) if pair == (left, right)
            )
            pieces[at : at + 2] = [left + right]


def cut(pattern: regex.Pattern[str], text: str) -> list[str]:
    """The matches and what lies between them, in order."""
    pieces, start = [], 0
    for match in pattern.finditer(text):
        pieces += [text[start : match.start()], match.group()]
        start = match.end()
    return [piece for piece in [*pieces, text[start:]] if piece]
