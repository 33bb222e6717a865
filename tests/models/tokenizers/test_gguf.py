"""What is wrong with a file's tokenizer keys is said in one line that names the key."""

import pytest
import vocabularies

from stoker.models.errors import StokerError
from stoker.models.tokenizers import PRE_TOKENIZERS, tokenizer_from_gguf

BPE = vocabularies.bpe("smollm")[1]
SPM = vocabularies.spm()[1]
SIZE = len(BPE["tokenizer.ggml.tokens"])


def message(metadata, **changes) -> str:
    changed = {**metadata, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}
    with pytest.raises(StokerError) as error:
        tokenizer_from_gguf(changed)
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("metadata", "key"),
    [
        (BPE, "model"),
        (BPE, "tokens"),
        (BPE, "merges"),
        (BPE, "pre"),
        (SPM, "tokens"),
        (SPM, "scores"),
    ],
)
def test_missing_key_is_named(metadata, key):
    without = {k: v for k, v in metadata.items() if k != f"tokenizer.ggml.{key}"}
    assert f"tokenizer.ggml.{key}" in message(without)


@pytest.mark.parametrize(
    ("metadata", "key", "value", "words"),
    [
        (BPE, "model", "bert", "'bert'"),
        (BPE, "model", 7, "int"),
        (BPE, "tokens", "abc", "str"),
        (BPE, "tokens", [], "empty"),
        (BPE, "tokens", [1] * SIZE, "entry 0"),
        (BPE, "tokens", ["x"] * SIZE, "twice"),
        (BPE, "merges", ["ab"], "'ab'"),
        (BPE, "merges", ["a b c"], "entry 0"),
        (BPE, "merges", ["q \u0416"], "\u0416"),
        (BPE, "token_type", [1, 1], "2 entries"),
        (BPE, "token_type", [9] * SIZE, "9"),
        (BPE, "token_type", ["1"] * SIZE, "'1'"),
        (BPE, "token_type", [6] * SIZE, "BYTE"),
        (BPE, "bos_token_id", SIZE, str(SIZE)),
        (BPE, "eos_token_id", -1, "-1"),
        (BPE, "eot_token_id", 10**9, "1000000000"),
        (BPE, "bos_token_id", True, "bool"),
        (BPE, "bos_token_id", 1.0, "float"),
        (BPE, "add_bos_token", 1, "int"),
        (SPM, "scores", [0.0], "1 entries"),
        (SPM, "scores", ["x"] * len(SPM["tokenizer.ggml.tokens"]), "'x'"),
        (SPM, "add_space_prefix", "yes", "str"),
    ],
)
def test_wrong_value_is_named_with_its_key(metadata, key, value, words):
    text = message(metadata, **{key: value})
    assert f"tokenizer.ggml.{key}" in text and words in text


def test_unknown_pre_tokenizer_names_the_supported_ones():
    text = message(BPE, pre="nonsense")
    assert "tokenizer.ggml.pre" in text and "'nonsense'" in text
    assert all(name in text for name in PRE_TOKENIZERS)


def test_vocabulary_that_is_not_byte_level_is_refused():
    text = message(BPE, tokens=[f"<{i:04d}>" for i in range(SIZE)], merges=[])
    assert "tokenizer.ggml.tokens" in text


def test_asking_for_a_token_that_is_not_there_is_refused():
    without = {k: v for k, v in BPE.items() if "bos_token_id" not in k}
    assert "tokenizer.ggml.bos_token_id" in message(without, add_bos_token=True)


def test_template_of_the_wrong_type_is_refused():
    with pytest.raises(StokerError, match=r"tokenizer\.chat_template is of type list"):
        tokenizer_from_gguf({**BPE, "tokenizer.chat_template": []})


def test_defaults_without_keys():
    keys = ("bos_token_id", "eos_token_id", "add_bos_token", "token_type")
    bpe = tokenizer_from_gguf(
        {k: v for k, v in BPE.items() if k.removeprefix("tokenizer.ggml.") not in keys}
    )
    assert bpe.bos_id is None and bpe.eos_id is None and bpe.bos_token == ""
    assert not bpe.add_bos and not bpe.add_eos and bpe.stop_ids == frozenset()
    spm = tokenizer_from_gguf(
        {k: v for k, v in SPM.items() if not k.endswith(("token_id", "token_type"))}
    )
    assert (spm.bos_id, spm.eos_id, spm.add_bos, spm.add_eos) == (1, 2, True, False)


def test_stop_tokens_are_those_of_sequence_turn_and_message():
    named = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 6}
    eos = BPE["tokenizer.ggml.eos_token_id"]
    assert tokenizer_from_gguf({**BPE, **named}).stop_ids == {eos, 5, 6}
    # Without a key an end-of-turn token is known by its spelling.
    other_eos = {"tokenizer.ggml.eos_token_id": eos - 2}
    assert tokenizer_from_gguf({**BPE, **other_eos}).stop_ids == {eos - 2, eos}


def test_a_reply_of_gpt_oss_ends_neither_after_its_thoughts_nor_past_a_call():
    tokens = [*BPE["tokenizer.ggml.tokens"], "<|return|>", "<|call|>", "<|end|>"]
    types = [*BPE["tokenizer.ggml.token_type"], 3, 3, 3]
    metadata = {**BPE, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    ends = {"tokenizer.ggml.eos_token_id": SIZE, "tokenizer.ggml.eot_token_id": SIZE + 2}
    assert tokenizer_from_gguf({**metadata, **ends}).stop_ids == {SIZE, SIZE + 1}
    # Elsewhere that token ends a turn.
    tokens[SIZE] = "<|other|>"
    assert tokenizer_from_gguf({**metadata, **ends}).stop_ids == {SIZE, SIZE + 2}


@pytest.mark.parametrize("token_id", [-1, SIZE])
def test_token_outside_the_vocabulary_is_named(token_id):
    built = tokenizer_from_gguf(BPE)
    for read in (built.token, built.token_bytes, lambda i: built.decode([i])):
        with pytest.raises(StokerError, match=f"token id {token_id} "):
            read(token_id)
