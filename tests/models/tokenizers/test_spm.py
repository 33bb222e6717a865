"""SentencePiece BPE: ids and text against sentencepiece itself and against llama.cpp."""

import json
import time

import pytest
import vocabularies

from stoker.models.errors import StokerError
from stoker.models.tokenizers import Tokenizer, tokenizer_from_gguf


@pytest.fixture(scope="module", params=[True, False], ids=["prefixed", "plain"])
def pair(request) -> tuple[object, Tokenizer]:
    processor, metadata = vocabularies.spm(request.param)
    return processor, tokenizer_from_gguf(metadata)


def test_ids_and_text_equal_sentencepiece(pair):
    processor, built = pair
    # A processor gives the ids of the text alone; BOS is the caller's business.
    for text in vocabularies.corpus():
        ids = built.encode(text, add_special=False)
        assert ids == processor.encode(text), repr(text)
        assert built.decode(ids) == processor.decode(ids), repr(text)
        # U+2581 stands for a space in this vocabulary, so it cannot come back.
        assert built.decode(ids) == text.replace("\u2581", " ")


@pytest.mark.parametrize("prefixed", [True, False])
def test_ids_equal_llama_cpp_also_around_special_tokens(prefixed):
    reference = json.loads((vocabularies.DATA / "spm_ids.json").read_text())
    metadata = dict(reference["metadata"])
    if not prefixed:
        metadata["tokenizer.ggml.add_space_prefix"] = False
    built = tokenizer_from_gguf(metadata)
    texts = [*vocabularies.corpus(), *reference["more_texts"]]
    expected = reference["prefixed_ids" if prefixed else "plain_ids"]
    for text, ids in zip(texts, expected, strict=True):
        assert built.encode(text, add_special=False, parse_special=True) == ids, repr(text)


def test_prefix_space_comes_at_the_start_and_after_each_special_token():
    processor, metadata = vocabularies.spm()
    built = tokenizer_from_gguf(metadata)
    m, u = built.vocab_size - 2, built.vocab_size - 1
    cases = {
        "w": processor.encode("w"),
        "<m>w": [m, *processor.encode("w")],
        "<m> w": [m, *processor.encode(" w")],
        "a<m>b": [*processor.encode("a"), m, *processor.encode("b")],
        "a<u>b": [*processor.encode("a"), u, *processor.encode("b")],
        " <m>": [*processor.encode(" "), m],
        "a  b": processor.encode("a  b"),
        "": [],
        "\n": processor.encode("\n"),
    }
    for text, ids in cases.items():
        assert built.encode(text, add_special=False, parse_special=True) == ids, text


def test_bos_is_added_unless_the_file_says_no(pair):
    built = pair[1]
    inner = built.encode("hi", add_special=False)
    assert built.encode("hi") == [1, *inner]
    assert built.encode("") == [1]
    metadata = {**vocabularies.spm()[1], "tokenizer.ggml.add_bos_token": False}
    assert tokenizer_from_gguf(metadata).encode("hi")[0] != 1


def test_leading_space_is_dropped_at_the_start_only():
    built = tokenizer_from_gguf(vocabularies.spm()[1])
    ids = built.encode("the end", add_special=False)
    assert built.decode(ids) == "the end"
    assert built.decode([1, *ids]) == "the end"
    assert built.decode(ids, continuation=True) == " the end"
    assert built.decode(built.encode("  x")) == "  x"
    m = built.vocab_size - 2
    assert built.decode([*ids, m, *ids], skip_special=False) == "the end<m> the end"


def test_byte_tokens_join_to_characters():
    built = tokenizer_from_gguf(vocabularies.spm()[1])
    first = vocabularies.spm()[1]["tokenizer.ggml.tokens"].index("<0x00>")
    emoji = [first + byte for byte in "🦊".encode()]
    assert built.decode(emoji) == "🦊"
    assert built.token_bytes(emoji[0]) == b"\xf0"
    assert built.decode(emoji[:2]) == "\ufffd"


def test_lone_surrogate_becomes_the_replacement_character(pair):
    assert pair[1].encode("x\ud83d") == pair[1].encode("x\ufffd")


def test_vocabulary_without_bytes_or_unknown_still_works():
    tokens = ["<s>", "</s>", "\u2581", "a", "b", "ab", "\u2581ab"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0, 0.0, -9.0, -9.0, -9.0, -1.0, -2.0],
        "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1, 1],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    built = tokenizer_from_gguf(metadata)
    assert built.encode("ab ab") == [0, 6, 6]
    # Nothing stands for an unknown letter, and no id outside the vocabulary comes out.
    assert built.encode("abz") == [0, 6]


def test_some_byte_tokens_are_not_enough():
    metadata = dict(vocabularies.spm()[1])
    types = list(metadata["tokenizer.ggml.token_type"])
    types[types.index(6)] = 1
    metadata["tokenizer.ggml.token_type"] = types
    with pytest.raises(StokerError, match="255 byte tokens"):
        tokenizer_from_gguf(metadata)


@pytest.mark.parametrize("unit", ["a", " ", "1"])
def test_time_is_near_linear(unit):
    built = tokenizer_from_gguf(vocabularies.spm()[1])

    def best(length: int) -> float:
        seconds = []
        for _ in range(2):
            start = time.thread_time()
            built.encode(unit * length)
            seconds.append(time.thread_time() - start)
        return min(seconds)

    short, long = best(100_000), best(200_000)
    assert long < 5
    assert long / short < 3.2
