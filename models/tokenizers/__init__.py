"""Tokenizers, streaming detokenisation and chat templates."""
