"""Byte-level BPE: ids against llama.cpp, Hugging Face's configurations and plain Python."""

import json
import time
import unicodedata

import pytest
import vocabularies

from stoker.models.checkpoints.gguf import read_header
from stoker.models.tokenizers import Tokenizer, tokenizer_from_gguf

PATTERNS = {
    "gpt-2": [vocabularies.GPT2],
    "smollm": [r"\p{N}", vocabularies.GPT2],
    "llama-bpe": [vocabularies.LLAMA3],
    "dbrx": [vocabularies.LLAMA3],
    "gpt-4o": [vocabularies.O200K],
    "qwen2": [vocabularies.QWEN2],
}
PRES = list(PATTERNS)


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2_path) -> Tokenizer:
    return tokenizer_from_gguf(read_header(smollm2_path).metadata)


def tokenizer(pre: str, **changes) -> Tokenizer:
    metadata = dict(vocabularies.bpe(pre)[1])
    metadata.update({f"tokenizer.ggml.{key}": value for key, value in changes.items()})
    return tokenizer_from_gguf(metadata)


def test_smollm2_ids_equal_llama_cpp(smollm2_tokenizer):
    reference = json.loads((vocabularies.DATA / "smollm2_ids.json").read_text())
    assert len(reference["texts"]) >= 200
    for text, ids in zip(reference["texts"], reference["ids"], strict=True):
        assert smollm2_tokenizer.encode(text) == ids, repr(text)


def test_smollm2_builds_quickly_and_knows_its_special_tokens(smollm2_path):
    metadata = read_header(smollm2_path).metadata
    # The best of three: the machine may be busy.
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        built = tokenizer_from_gguf(metadata)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1.0
    assert built.vocab_size == 49152
    assert built.stop_ids == {2} and built.bos_id == 1 and built.eos_token == "<|im_end|>"
    assert not built.add_bos and len(built.special_ids) == 17


def test_smollm2_decodes_what_it_encodes(smollm2_tokenizer):
    # The vocabulary has no token for 21 of the bytes; texts with one are left out.
    lacking = set("\u0378\U0010ffff\ue000\ufdd0") | {chr(c) for c in range(0x20)} - set("\t\n\r")
    for text in vocabularies.corpus():
        if not lacking & set(text):
            assert smollm2_tokenizer.decode(smollm2_tokenizer.encode(text)) == text


@pytest.mark.parametrize("pre", PRES)
def test_ids_equal_hugging_face_and_plain_python(pre):
    engine, metadata = vocabularies.bpe(pre)
    plain = vocabularies.PlainBpe(metadata, PATTERNS[pre])
    built = tokenizer_from_gguf(metadata)
    for text in vocabularies.corpus():
        if "<|" in text:
            continue
        ids = built.encode(text)
        assert ids == engine.encode(text).ids, repr(text)
        composed = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        assert ids == plain.encode(composed), repr(text)
        assert built.decode(ids) == composed


def test_rules_differ_on_the_corpus():
    """The comparison above means something only if no two rules cut all texts alike."""
    engines = {pre: vocabularies.published_tokenizer(pre) for pre in PRES}
    cuts = {
        pre: [
            [word for word, _ in engine.pre_tokenizer.pre_tokenize_str(text)]
            for text in vocabularies.corpus()
        ]
        for pre, engine in engines.items()
    }
    # dbrx cuts as llama-bpe does; they differ in whole words that are tokens.
    pres = [pre for pre in PRES if pre != "dbrx"]
    assert all(cuts[a] != cuts[b] for a in pres for b in pres if a != b)


def test_llama3_rule_prefers_a_whole_word_and_adds_bos():
    metadata = dict(vocabularies.bpe("llama-bpe")[1])
    size = len(metadata["tokenizer.ggml.tokens"])
    # No merge makes this token; only the rule's `ignore_merges` finds it.
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "xqzv"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
    del metadata["tokenizer.ggml.add_bos_token"]
    built = tokenizer_from_gguf(metadata)
    assert built.encode("xqzv") == [built.bos_id, size]
    metadata["tokenizer.ggml.pre"] = "qwen2"
    built = tokenizer_from_gguf(metadata)
    assert size not in built.encode("xqzv") and not built.add_bos


def test_default_rule_cuts_threes_and_punctuation():
    metadata = dict(vocabularies.bpe("gpt-2")[1])
    metadata["tokenizer.ggml.pre"] = "default"
    patterns = [
        r"[\p{P}\$\+<=>\^~\|]+",
        vocabularies.GPT2.removesuffix(r"|\s+"),
        r"\p{N}+",
        r"[0-9][0-9][0-9]",
    ]
    plain = vocabularies.PlainBpe(metadata, patterns)
    default = tokenizer_from_gguf(metadata)
    for text in vocabularies.corpus():
        if "<|" not in text:
            assert default.encode(text) == plain.encode(text), repr(text)


def test_control_tokens_are_parsed_only_on_request():
    built = tokenizer("smollm")
    im_end, think = built.eos_id, built.eos_id + 1
    text = "a<|im_end|><think>b"
    assert im_end in built.encode(text, parse_special=True)
    plain = built.encode(text)
    # A user-defined token always matches.
    assert im_end not in plain and think in plain
    assert built.decode(plain) == text
    parsed = built.encode(text, parse_special=True)
    assert built.decode(parsed) == "a<think>b"
    assert built.decode(parsed, skip_special=False) == text


def test_special_tokens_are_shown_without_spaces_between():
    metadata = dict(vocabularies.bpe("smollm")[1])
    size = len(metadata["tokenizer.ggml.tokens"])
    calls = ["<tool_call>", "</tool_call>"]
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], *calls]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 3, 3]
    built = tokenizer_from_gguf(metadata)
    ids = [size, *built.encode("{"), *built.encode("}"), size + 1]
    assert built.decode(ids, skip_special=False) == "<tool_call>{}</tool_call>"
    assert built.decode(ids) == "{}"


def test_longest_special_token_wins():
    metadata = dict(vocabularies.bpe("smollm")[1])
    size = len(metadata["tokenizer.ggml.tokens"])
    added = ["<t>", "<t><t>x", "<t2>"]
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], *added]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 4, 4, 4]
    built = tokenizer_from_gguf(metadata)
    assert built.encode("<t><t>x<t><t2>") == [size + 1, size, size + 2]
    assert built.encode("<t><t><t>") == [size, size, size]


def test_bos_and_eos_are_added_as_the_file_says():
    built = tokenizer("smollm", add_bos_token=True, add_eos_token=True)
    inner = built.encode("hi", add_special=False)
    assert built.encode("hi") == [built.bos_id, *inner, built.eos_id]
    assert built.encode("") == [built.bos_id, built.eos_id]
    assert built.encode("", add_special=False) == []


def test_lone_surrogate_becomes_the_replacement_character():
    built = tokenizer("smollm")
    assert built.encode("x\ud83d") == built.encode("x\ufffd")


def test_unused_tokens_show_nothing():
    built = tokenizer("smollm")
    unused = built.vocab_size - 1
    assert built.token(unused) == "[PAD0]" and built.decode([unused]) == ""
    assert unused not in built.encode("[PAD0]", parse_special=True)


@pytest.mark.parametrize("unit", ["a", " ", "1", "\n"])
@pytest.mark.parametrize("pre", ["smollm", "llama-bpe"])
def test_time_is_near_linear(pre, unit):
    built = tokenizer(pre)

    def best(length: int) -> float:
        text = unit * (length // len(unit))
        seconds = []
        for _ in range(2):
            # Time of this thread: neighbours on the machine do not count.
            start = time.thread_time()
            built.encode(text)
            seconds.append(time.thread_time() - start)
        return min(seconds)

    short, long = best(100_000), best(200_000)
    assert long < 5
    # Two is linear; a quadratic method shows four.
    assert long / short < 3.2
