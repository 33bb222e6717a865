"""Text of a stream of tokens, as soon as it is certain."""

from __future__ import annotations

import codecs

from .base import Tokenizer


class Detokenizer:
    """Turns tokens into text one by one.

    The pieces that `push` and `flush` return, joined, equal `tokenizer.decode` of all the ids with
    the same flags. A character whose bytes are spread over tokens is held back until it is whole,
    or until a byte proves that it never will be.

    Args:
      tokenizer: decodes the tokens.
      skip_special: leave control tokens out.
      continuation: the tokens follow other text (see `Tokenizer.decode`).
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special: bool = True, continuation: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._at_start = not continuation
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; often one piece, sometimes none.

        Raises:
          StokerError: the vocabulary has no such id.
        """
        data = self._tokenizer.visible_bytes(
            token_id, skip_special=self._skip_special, at_start=self._at_start
        )
        if data is None:
            return ""
        self._at_start = False
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is left at the end of the stream: U+FFFD for an unfinished character, or nothing."""
        return self._decoder.decode(b"", final=True)
