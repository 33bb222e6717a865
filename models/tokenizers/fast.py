"""The tokenizer of a `tokenizer.json`, run by the `tokenizers` library."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

from ..errors import StokerError
from .base import Tokenizer, TokenType, Vocabulary, without_surrogates
from .bpe import byte_letters

_SPACE = "\u2581"


class FastTokenizer(Tokenizer):
    """Byte-level or SentencePiece-like BPE (or Unigram) as a `tokenizer.json` describes it.

    Text is encoded by the library as a whole, so added tokens swallow spaces and count words as
    their flags say. Only where control tokens must be kept apart from text that spells them
    (`encode_marked`) is it encoded run by run.

    Args:
      source: the text of the file.
      values: its object.
      vocabulary: from `read_vocabulary`.

    Raises:
      StokerError: its decoder is not one of those.
    """

    def __init__(self, source: str, values: Mapping[str, Any], vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._source = source
        decoders = [part["type"] for part in steps_of(values.get("decoder"))]
        if unknown := set(decoders) - {"ByteLevel", "Replace", "ByteFallback", "Fuse", *_STRIPPING}:
            raise StokerError(
                f"tokenizer.json has the decoder {', '.join(sorted(unknown))}, which is not "
                "supported; give a model with a byte-level or SentencePiece tokenizer"
            )
        self._byte_level = "ByteLevel" in decoders
        self._strips = any(
            _STRIPPING.get(part["type"], _never)(part) for part in steps_of(values.get("decoder"))
        )
        self._bytes_of = {letter: byte for byte, letter in enumerate(byte_letters())}

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """As `Tokenizer.encode`; added tokens are found as the library finds them."""
        engine = self._parsing if parse_special else self._plain
        ids: list[int] = engine.encode(without_surrogates(text), add_special_tokens=False).ids
        if add_special and self.add_bos and self.bos_id is not None:
            ids = [self.bos_id, *ids]
        if add_special and self.add_eos and self.eos_id is not None:
            ids = [*ids, self.eos_id]
        return ids

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """As `Tokenizer.encode_marked`; without a mark, exactly what the library gives."""
        if mark not in text:
            return self.encode(text, add_special=False, parse_special=True)
        ids: list[int] = []
        for run, control_id in self.split_control(without_surrogates(text)):
            engine = self._inner if ids else self._plain
            if run:
                ids.extend(engine.encode(run.replace(mark, ""), add_special_tokens=False).ids)
            if control_id is not None:
                ids.append(control_id)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """As `Tokenizer.token_bytes`; added tokens are spelt like all others."""
        self._check(token_id)
        kind = self._vocabulary.types[token_id]
        if kind in (TokenType.UNUSED, TokenType.BYTE):
            return super().token_bytes(token_id)
        return self._piece_bytes(self._vocabulary.tokens[token_id])

    @functools.cached_property
    def _parsing(self) -> Any:
        """Finds control tokens in text."""
        return engine_of(self._source)

    @functools.cached_property
    def _plain(self) -> Any:
        """Takes the spelling of a control token for text."""
        engine = engine_of(self._source)
        engine.encode_special_tokens = True
        return engine

    @functools.cached_property
    def _inner(self) -> Any:
        """Like `_plain`, for text that does not begin the prompt."""
        values = json.loads(self._source)
        for part in steps_of(values.get("pre_tokenizer")):
            if part["type"] == "Metaspace" and part.get("prepend_scheme") == "first":
                part["prepend_scheme"] = "never"
        engine = engine_of(json.dumps(values))
        engine.encode_special_tokens = True
        return engine

    def _encode_run(self, text: str) -> list[int]:
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def _piece_bytes(self, piece: str) -> bytes:
        if self._byte_level:
            try:
                return bytes([self._bytes_of[letter] for letter in piece])
            except KeyError:
                return piece.encode("utf-8", errors="replace")
        return piece.replace(_SPACE, " ").encode("utf-8", errors="replace")

    def _without_prefix(self, token_id: int, data: bytes) -> bytes:
        return data.removeprefix(b" ") if self._strips else data


def _never(decoder: Mapping[str, Any]) -> bool:
    return False


#: Decoders that may drop the space that begins a text, and whether this one does.
_STRIPPING = {
    "Strip": lambda decoder: decoder.get("content") == " " and decoder.get("start", 0) > 0,
    "Metaspace": lambda decoder: (
        decoder.get("prepend_scheme", "always") != "never" and decoder.get("add_prefix_space", True)
    ),
}


def engine_of(source: str) -> Any:
    """The library's tokenizer of the text of a `tokenizer.json`.

    Raises `StokerError` where the library refuses it.
    """
    try:
        engine = tokenizers.Tokenizer.from_str(source)
    except Exception as error:  # the library raises bare exceptions
        raise StokerError(
            f"tokenizer.json cannot be read ({' '.join(str(error).split()):.120}); download it "
            "again, or update the tokenizers package"
        ) from None
    engine.no_truncation()
    engine.no_padding()
    return engine


def steps_of(part: Mapping[str, Any] | None) -> Iterator[Any]:
    """The steps of a normalizer, a decoder and the like of a `tokenizer.json`, sequences open."""
    if not part:
        return
    for name in ("normalizers", "pretokenizers", "decoders", "processors"):
        if part.get("type") == "Sequence" and name in part:
            for step in part[name]:
                yield from steps_of(step)
            return
    yield part


def check_template(values: Mapping[str, Any]) -> None:
    """Raises `StokerError` where tokens are put around a text that their table lacks.

    The library reads such a file, and dies of it when it encodes.
    """
    for step in steps_of(values.get("post_processor")):
        for piece in (*step.get("single", ()), *step.get("pair", ())):
            token = piece.get("SpecialToken", {}).get("id")
            if token is not None and token not in step.get("special_tokens", {}):
                raise StokerError(
                    f"tokenizer.json puts '{token:.60}' around a text, which the special_tokens of "
                    "its post_processor lack; download it again"
                )


def read_pieces(values: Mapping[str, Any], engine: Any) -> tuple[list[str], list[TokenType]]:
    """Spelling and type of each token id; ids that no token has are unused."""
    ids: dict[str, int] = engine.get_vocab(with_added_tokens=True)
    size = max(ids.values(), default=-1) + 1
    # A hostile id must not make a list of billions.
    if not 0 < size <= 4 * len(ids) + 4096:
        raise StokerError(
            f"tokenizer.json has {len(ids)} tokens with ids up to {size - 1}; download it again"
        )
    tokens, types = [""] * size, [TokenType.UNUSED] * size
    fallback = any(part["type"] == "ByteFallback" for part in steps_of(values.get("decoder")))
    byte_spellings = {f"<0x{byte:02X}>" for byte in range(256)} if fallback else set()
    for token, i in ids.items():
        tokens[i] = token
        types[i] = TokenType.BYTE if token in byte_spellings else TokenType.NORMAL
    for i, added in engine.get_added_tokens_decoder().items():
        types[i] = TokenType.CONTROL if added.special else TokenType.USER_DEFINED
    return tokens, types
