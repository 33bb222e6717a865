"""Tokenizers, streaming detokenisation and chat templates."""

from .base import Tokenizer, TokenType, Vocabulary
from .bpe import PRE_TOKENIZERS, BpeTokenizer, PreTokenizer
from .chat import encode_chat, render_chat
from .detokenizer import Detokenizer
from .fast import FastTokenizer
from .folder import tokenizer_from_folder
from .gguf import tokenizer_from_gguf
from .spm import SpmTokenizer

__all__ = [
    "PRE_TOKENIZERS",
    "BpeTokenizer",
    "Detokenizer",
    "FastTokenizer",
    "PreTokenizer",
    "SpmTokenizer",
    "TokenType",
    "Tokenizer",
    "Vocabulary",
    "encode_chat",
    "render_chat",
    "tokenizer_from_folder",
    "tokenizer_from_gguf",
]
