"""Streamed text equals decoded text, and no delta shows half a character."""

import random

import pytest
import vocabularies
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.models.tokenizers import Detokenizer, Tokenizer, tokenizer_from_gguf

TOKENIZERS = {
    "gpt-2": tokenizer_from_gguf(vocabularies.bpe("gpt-2")[1]),
    "llama-bpe": tokenizer_from_gguf(vocabularies.bpe("llama-bpe")[1]),
    "spm": tokenizer_from_gguf(vocabularies.spm()[1]),
    "spm-plain": tokenizer_from_gguf(vocabularies.spm(False)[1]),
}
KINDS = list(TOKENIZERS)


def stream(tokenizer: Tokenizer, ids: list[int], **flags: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **flags)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """The ids that stand for exactly these single bytes."""
    found = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [found[bytes([byte])] for byte in data]


@pytest.mark.parametrize("continuation", [True, False])
@pytest.mark.parametrize("skip_special", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_500_random_sequences(kind, skip_special, continuation):
    tokenizer = TOKENIZERS[kind]
    flags = {"skip_special": skip_special, "continuation": continuation}
    draw = random.Random(7)
    spaces = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i)[:1] == b" "]
    for n in range(500):
        ids = [draw.randrange(tokenizer.vocab_size) for _ in range(draw.randrange(1, 40))]
        # Some begin with one or two pieces that begin with a space, some with a control token.
        ids = draw.sample(spaces, n % 3) + ids
        if n % 5 == 0:
            ids.insert(0, tokenizer.eos_id)
        assert "".join(stream(tokenizer, ids, **flags)) == tokenizer.decode(ids, **flags)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), kind=st.sampled_from(KINDS), skip=st.booleans(), continuation=st.booleans())
def test_stream_equals_decode(data, kind, skip, continuation):
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1)))
    flags = {"skip_special": skip, "continuation": continuation}
    assert "".join(stream(tokenizer, ids, **flags)) == tokenizer.decode(ids, **flags)


@settings(max_examples=200, deadline=None)
@given(text=st.text(), kind=st.sampled_from(["gpt-2", "llama-bpe"]))
def test_any_text_comes_back(text, kind):
    tokenizer = TOKENIZERS[kind]
    assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


@settings(max_examples=100, deadline=None)
@given(data=st.lists(st.integers(0, 255)))
def test_any_bytes_are_read_as_python_reads_them(data):
    tokenizer = TOKENIZERS["spm-plain"]
    first = tokenizer._vocabulary.tokens.index("<0x00>")
    ids = [first + byte for byte in data]
    assert "".join(stream(tokenizer, ids)) == bytes(data).decode("utf-8", errors="replace")


@pytest.mark.parametrize("kind", KINDS)
def test_emoji_in_four_tokens_is_held_until_whole(kind):
    tokenizer = TOKENIZERS[kind]
    ids = byte_ids(tokenizer, "🦊A".encode())
    assert stream(tokenizer, ids) == ["", "", "", "🦊", "A", ""]
    # Cut off after two bytes: one replacement character, at the end only.
    assert stream(tokenizer, ids[:2]) == ["", "", "\ufffd"]


@pytest.mark.parametrize("kind", KINDS)
def test_invalid_byte_does_not_stall_the_stream(kind):
    tokenizer = TOKENIZERS[kind]
    for bad in (b"\xff", b"\xf0\x9f", b"\x80"):
        deltas = stream(tokenizer, byte_ids(tokenizer, bad + b"a" * 100))
        assert "".join(deltas) == "\ufffd" + "a" * 100
        assert all(delta.endswith("a") for delta in deltas[len(bad) : -1])


def test_control_tokens_show_only_on_request():
    tokenizer = TOKENIZERS["gpt-2"]
    ids = [tokenizer.eos_id, *tokenizer.encode("ok", add_special=False)]
    assert "".join(stream(tokenizer, ids)) == "ok"
    assert "".join(stream(tokenizer, ids, skip_special=False)) == "<|im_end|>ok"
