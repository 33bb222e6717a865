"""SentencePiece BPE with byte fallback (Llama 2, Mistral, Gemma and others)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from ..errors import StokerError
from .base import Tokenizer, TokenType, Vocabulary

_SPACE = "\u2581"
# The generated module makes its classes at run time; type checkers see none of them.
_proto: Any = sentencepiece_model_pb2


class SpmTokenizer(Tokenizer):
    """SentencePiece BPE, run by the `sentencepiece` library on a model made in memory.

    With `add_space_prefix` every run of text gets a space before it: at the start, and again
    after each special or user-defined token. llama.cpp and Hugging Face's `legacy` Llama
    tokenizer do so; sentencepiece alone, which takes user-defined pieces for text, would put it
    only at the start. `decode` drops that space at the start of a text and nowhere else.

    Args:
      vocabulary: the tokens, with U+2581 for a space and <0xNN> for a byte.
      scores: V scores; the pair with the highest is merged first.
      add_space_prefix: whether a run of text gets a space before it.

    Raises:
      StokerError: some but not all 256 byte tokens are there, or the library refuses the model.
    """

    def __init__(
        self, vocabulary: Vocabulary, scores: Sequence[float], add_space_prefix: bool = True
    ) -> None:
        super().__init__(vocabulary)
        self._add_space_prefix = add_space_prefix
        self._vocab_end = len(vocabulary.tokens)
        model = _model_proto(vocabulary, scores, add_space_prefix)
        self._engine = sentencepiece.SentencePieceProcessor()
        try:
            self._engine.LoadFromSerializedProto(model.SerializeToString())
        except RuntimeError as error:
            raise StokerError(
                f"sentencepiece refuses the vocabulary of tokenizer.ggml.tokens "
                f"({' '.join(str(error).split())}); convert the model again"
            ) from error

    def _encode_run(self, text: str) -> list[int]:
        return [i for i in self._engine.EncodeAsIds(text) if i < self._vocab_end]

    def _piece_bytes(self, piece: str) -> bytes:
        return piece.replace(_SPACE, " ").encode("utf-8", errors="replace")

    def _without_prefix(self, token_id: int, data: bytes) -> bytes:
        if self._add_space_prefix and self._vocabulary.types[token_id] is not TokenType.BYTE:
            return data.removeprefix(b" ")
        return data


def _model_proto(vocabulary: Vocabulary, scores: Sequence[float], add_space_prefix: bool) -> Any:
    kinds = _proto.ModelProto.SentencePiece
    byte_tokens = {
        token
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind is TokenType.BYTE
    }
    if byte_tokens and len(byte_tokens) != 256:
        raise StokerError(
            f"tokenizer.ggml.token_type marks {len(byte_tokens)} byte tokens where byte fallback "
            "needs all 256; convert the model again"
        )
    model = _proto.ModelProto()
    unknown_seen = False
    for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind is TokenType.NORMAL and token:
            piece, piece_kind = token, kinds.NORMAL
        elif kind is TokenType.BYTE:
            piece, piece_kind = token, kinds.BYTE
        elif kind is TokenType.UNUSED and token:
            piece, piece_kind = token, kinds.UNUSED
        elif kind is TokenType.UNKNOWN and not unknown_seen:
            piece, piece_kind, unknown_seen = f"  unknown {i}", kinds.UNKNOWN, True
        else:
            # Found before the library sees the text. It needs a name that no text has: the
            # library has no bare spaces.
            piece, piece_kind = f"  {i}", kinds.CONTROL
        model.pieces.add(piece=piece, score=scores[i], type=piece_kind)
    if not unknown_seen:
        # The library insists on one; this id is past the vocabulary and never returned.
        model.pieces.add(piece="  unknown", score=0.0, type=kinds.UNKNOWN)
    trainer = model.trainer_spec
    trainer.model_type = _proto.TrainerSpec.BPE
    trainer.vocab_size = len(model.pieces)
    trainer.byte_fallback = bool(byte_tokens)
    normalizer = model.normalizer_spec
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = add_space_prefix
    normalizer.remove_extra_whitespaces = False
    normalizer.escape_whitespaces = True
    return model
