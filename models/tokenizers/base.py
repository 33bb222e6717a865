"""What every tokenizer does: find special tokens, encode the text between them, decode."""

from __future__ import annotations

import abc
import dataclasses
import enum
import re
from collections.abc import Iterable, Iterator

from ..errors import StokerError


class TokenType(enum.IntEnum):
    """Kinds of token, numbered as `tokenizer.ggml.token_type` numbers them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model and what it says about them.

    Attributes:
      tokens: V piece strings, in the spelling of the tokenizer kind.
      types: V token types.
      bos_id: token that begins a sequence, if any.
      eos_id: token that ends a sequence, if any.
      stop_ids: tokens that end a reply (end of sequence, of turn, of message).
      add_bos: `encode` puts `bos_id` first.
      add_eos: `encode` puts `eos_id` last.
      chat_template: Jinja template of a conversation, if any.
      template_source: file or key that it is from, for people; empty without one.
    """

    tokens: tuple[str, ...]
    types: tuple[TokenType, ...]
    bos_id: int | None = None
    eos_id: int | None = None
    stop_ids: frozenset[int] = frozenset()
    add_bos: bool = False
    add_eos: bool = False
    chat_template: str | None = None
    template_source: str = ""


class Tokenizer(abc.ABC):
    """Text to token ids and back; immutable, and safe to share between threads.

    Special tokens are found in the text first, leftmost and then longest; the text between them
    is encoded run by run. User-defined tokens are always found; control tokens only where the
    caller asks for them.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        ids_of: dict[TokenType, dict[str, int]] = {kind: {} for kind in TokenType}
        special = []
        for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
            if kind is not TokenType.NORMAL and token:
                ids_of[kind][token] = i
            if kind is TokenType.CONTROL or kind is TokenType.UNKNOWN:
                special.append(i)
        self._special_ids = frozenset(special)
        control = ids_of[TokenType.CONTROL] | ids_of[TokenType.UNKNOWN]
        user_defined = ids_of[TokenType.USER_DEFINED]
        self._literals = control | user_defined
        self._control_pattern = literal_pattern(control)
        self._user_pattern = literal_pattern(user_defined)
        self._all_pattern = literal_pattern(self._literals)
        self._control_literals = tuple(control)

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens."""
        return len(self._vocabulary.tokens)

    @property
    def bos_id(self) -> int | None:
        """Token that begins a sequence, or None."""
        return self._vocabulary.bos_id

    @property
    def eos_id(self) -> int | None:
        """Token that ends a sequence, or None."""
        return self._vocabulary.eos_id

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a reply: end of sequence, of turn and of message."""
        return self._vocabulary.stop_ids

    @property
    def add_bos(self) -> bool:
        """Whether `encode` puts `bos_id` first."""
        return self._vocabulary.add_bos

    @property
    def add_eos(self) -> bool:
        """Whether `encode` puts `eos_id` last."""
        return self._vocabulary.add_eos

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are not text: control tokens and the unknown token."""
        return self._special_ids

    @property
    def chat_template(self) -> str | None:
        """Jinja template of a conversation that the model came with, or None."""
        return self._vocabulary.chat_template

    @property
    def template_source(self) -> str:
        """File or key that the chat template is from; empty without one."""
        return self._vocabulary.template_source

    @property
    def bos_token(self) -> str:
        """Spelling of `bos_id`, or the empty string."""
        return "" if self.bos_id is None else self.token(self.bos_id)

    @property
    def eos_token(self) -> str:
        """Spelling of `eos_id`, or the empty string."""
        return "" if self.eos_id is None else self.token(self.eos_id)

    @property
    def control_literals(self) -> tuple[str, ...]:
        """Spellings of the special tokens."""
        return self._control_literals

    def token(self, token_id: int) -> str:
        """The piece string of a token, as the vocabulary spells it.

        Raises:
          StokerError: the vocabulary has no such id.
        """
        self._check(token_id)
        return self._vocabulary.tokens[token_id]

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Token ids of `text`.

        Args:
          text: any string; a lone surrogate, which no UTF-8 text can hold, becomes U+FFFD.
          add_special: add the begin and end tokens that the model asks for.
          parse_special: text that spells a control token becomes that token.
        """
        ids: list[int] = []
        if add_special and self.add_bos and self.bos_id is not None:
            ids.append(self.bos_id)
        pattern = self._all_pattern if parse_special else self._user_pattern
        for run, literal in split_literals(pattern, without_surrogates(text)):
            if run:
                ids.extend(self._encode_run(run))
            if literal:
                ids.append(self._literals[literal])
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Token ids of a rendered prompt: control tokens are parsed, and begin and end not added.

        `mark`, a character that keeps other text from spelling a control token, is taken out of
        what is encoded.
        """
        ids: list[int] = []
        for run, control_id in self.split_control(without_surrogates(text)):
            ids.extend(self.encode(run.replace(mark, ""), add_special=False))
            if control_id is not None:
                ids.append(control_id)
        return ids

    def split_control(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Yields (run, id): text with no special token in it, then the token that follows it.

        The last id is None. Runs may be empty.
        """
        for run, literal in split_literals(self._control_pattern, text):
            yield run, self._literals[literal] if literal else None

    def decode(
        self, ids: Iterable[int], *, skip_special: bool = True, continuation: bool = False
    ) -> str:
        """Text of token ids: their bytes joined, then read as UTF-8.

        Args:
          ids: token ids.
          skip_special: leave control tokens out.
          continuation: the ids follow other text, so a space that begins them is kept where a
            tokenizer that prefixes text with a space would drop it.

        Returns:
          The text; bytes that are not UTF-8 become U+FFFD. Nothing is added or tidied.

        Raises:
          StokerError: the vocabulary has no such id.
        """
        parts = []
        at_start = not continuation
        for token_id in ids:
            data = self.visible_bytes(token_id, skip_special=skip_special, at_start=at_start)
            if data is not None:
                at_start = False
                parts.append(data)
        return b"".join(parts).decode("utf-8", errors="replace")

    def visible_bytes(self, token_id: int, *, skip_special: bool, at_start: bool) -> bytes | None:
        """Bytes that a token shows in a text, or None if it shows nothing.

        `at_start` says that no token before it has shown anything.
        """
        data = self.token_bytes(token_id)
        if not data or (skip_special and token_id in self._special_ids):
            return None
        return self._without_prefix(token_id, data) if at_start else data

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of text that a token stands for, whatever its neighbours.

        A control or user-defined token stands for its spelling, an unused one for nothing.

        Raises:
          StokerError: the vocabulary has no such id.
        """
        self._check(token_id)
        kind = self._vocabulary.types[token_id]
        piece = self._vocabulary.tokens[token_id]
        if kind is TokenType.UNUSED:
            return b""
        if kind is TokenType.BYTE:
            return bytes([int(piece[3:5], 16)])
        if kind is TokenType.NORMAL:
            return self._piece_bytes(piece)
        return piece.encode("utf-8", errors="replace")

    @abc.abstractmethod
    def _encode_run(self, text: str) -> list[int]:
        """Ids of a non-empty run in which no special token is looked for."""

    @abc.abstractmethod
    def _piece_bytes(self, piece: str) -> bytes:
        """The bytes that a normal token's spelling stands for."""

    def _without_prefix(self, token_id: int, data: bytes) -> bytes:
        """The token's bytes where it begins a text: `encode` may have put a space there."""
        return data

    def _check(self, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise StokerError(
                f"token id {token_id} is not in the vocabulary; use ids from 0 to "
                f"{self.vocab_size - 1}"
            )


def without_surrogates(text: str) -> str:
    """The text with each lone surrogate replaced by U+FFFD."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def split_literals(pattern: re.Pattern[str] | None, text: str) -> Iterator[tuple[str, str]]:
    """Yields (run, literal) through the text; the last literal is the empty string."""
    start = 0
    if pattern is not None:
        for match in pattern.finditer(text):
            yield text[start : match.start()], match.group()
            start = match.end()
    yield text[start:], ""


def literal_pattern(literals: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that finds the longest of the literals at the leftmost place; None without any.

    It is a trie written as a regular expression, so its cost per character does not grow with
    the number of literals (some vocabularies have a thousand).
    """
    trie: dict[str, dict] = {}
    for literal in literals:
        node = trie
        for letter in literal:
            node = node.setdefault(letter, {})
        node[""] = {}
    return re.compile(_trie_source(trie)) if trie else None


def _trie_source(node: dict[str, dict]) -> str:
    chain = ""
    while len(node) == 1 and "" not in node:
        letter, node = next(iter(node.items()))
        chain += re.escape(letter)
    branches = [re.escape(letter) + _trie_source(child) for letter, child in node.items() if letter]
    if not branches:
        return chain
    return f"{chain}(?:{'|'.join(branches)}){'?' if '' in node else ''}"
