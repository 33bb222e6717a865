"""Files of ranks: ids equal those of the tiktoken library and of transformers' converter."""

from __future__ import annotations

import base64
import json
import pathlib
import random

import pytest
import tiktoken
import vocabularies

from stoker.models.errors import StokerError
from stoker.models.tokenizers import tokenizer_from_folder
from stoker.models.tokenizers.bpe import byte_letters

PATTERNS = {"tokenizer.model": vocabularies.LLAMA3, "o200k_base.tiktoken": vocabularies.O200K}


def train() -> list[bytes]:
    """Tokens by rank: bytes in a shuffled order, then trained pieces and some nothing merges to."""
    engine, _ = vocabularies.bpe("gpt-4o")
    letters = {letter: byte for byte, letter in enumerate(byte_letters())}
    vocabulary = json.loads(engine.to_str())["model"]["vocab"]
    pieces = [bytes(letters[letter] for letter in piece) for piece in vocabulary]
    # tiktoken takes a word that is a token whole, whatever could merge to it.
    longer = [piece for piece in pieces if len(piece) > 1] + [b" zqxj", b"unmergeable"]
    single = [bytes([byte]) for byte in range(256)]
    random.Random(0).shuffle(single)
    return single + longer


TOKENS = train()


def write_ranks(path: pathlib.Path, tokens: list[bytes] = TOKENS) -> None:
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    path.write_text("".join(lines))


def reference(name: str, special: dict[str, int]) -> tiktoken.Encoding:
    ranks = {token: rank for rank, token in enumerate(TOKENS)}
    return tiktoken.Encoding(
        "tiny", pat_str=PATTERNS[name], mergeable_ranks=ranks, special_tokens=special
    )


@pytest.mark.parametrize("name", PATTERNS)
def test_ids_and_texts_are_tiktokens(name, tmp_path):
    write_ranks(tmp_path / name)
    tokenizer = tokenizer_from_folder(tmp_path)
    texts = [*vocabularies.corpus(), " zqxj unmergeable", "<|eot_id|> <|end|>"]
    plain = reference(name, {})
    for text in texts:
        ids = tokenizer.encode(text, add_special=False)
        assert ids == plain.encode(text, disallowed_special=())
        assert tokenizer.decode(ids) == plain.decode(ids)
    special = {tokenizer.token(i): i for i in tokenizer.special_ids}
    parsing = reference(name, special)
    text = "".join(f"{token}a {token}" for token in special if "reserved" not in token)
    ids = tokenizer.encode(text, add_special=False, parse_special=True)
    assert ids == parsing.encode(text, allowed_special="all")


@pytest.mark.reference
def test_ids_are_those_of_transformers(tmp_path):
    from transformers.convert_slow_tokenizer import TikTokenConverter

    write_ranks(tmp_path / "tokenizer.model")
    engine = TikTokenConverter(str(tmp_path / "tokenizer.model")).converted()
    tokenizer = tokenizer_from_folder(tmp_path)
    for text in vocabularies.corpus():
        ids = engine.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special=False) == ids


def test_special_tokens_of_llama_3(tmp_path):
    """The ids that Llama 3.1's own tokenizer.json has, less its 128,000 ranks."""
    write_ranks(tmp_path / "tokenizer.model")
    tokenizer = tokenizer_from_folder(tmp_path)
    n = len(TOKENS)
    assert tokenizer.vocab_size == n + 256 and len(tokenizer.special_ids) == 256
    expected = {
        0: "<|begin_of_text|>",
        1: "<|end_of_text|>",
        4: "<|finetune_right_pad_id|>",
        6: "<|start_header_id|>",
        7: "<|end_header_id|>",
        8: "<|eom_id|>",
        9: "<|eot_id|>",
        10: "<|python_tag|>",
        255: "<|reserved_special_token_247|>",
    }
    for offset, token in expected.items():
        assert tokenizer.token(n + offset) == token
    assert tokenizer.encode("a")[0] == tokenizer.bos_id == n
    assert tokenizer.stop_ids == {n + 1, n + 8, n + 9}


def test_special_tokens_of_gpt_oss(tmp_path):
    """Those of tiktoken's own `o200k_harmony`, less its 199,998 ranks."""
    write_ranks(tmp_path / "o200k_base.tiktoken")
    tokenizer = tokenizer_from_folder(tmp_path)
    n = len(TOKENS)
    assert tokenizer.vocab_size == n + 201_088 - 199_998
    named = {"<|startoftext|>": 199_998, "<|return|>": 200_002, "<|constrain|>": 200_003}
    named |= {"<|channel|>": 200_005, "<|start|>": 200_006, "<|end|>": 200_007}
    named |= {"<|message|>": 200_008, "<|call|>": 200_012, "<|reserved_201087|>": 201_087}
    for token, token_id in named.items():
        assert tokenizer.token(token_id - 199_998 + n) == token
    assert not tokenizer.add_bos
    assert tokenizer.stop_ids == {n + 1, n + 4, n + 14}


def test_settings_of_the_folder_have_the_last_word(tmp_path):
    write_ranks(tmp_path / "tokenizer.model")
    n = len(TOKENS)
    decoder = {str(n + 4): {"content": "<|mine|>"}, str(n + 300): {"content": "<|far|>"}}
    settings = {"added_tokens_decoder": decoder, "eos_token": "<|mine|>", "add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [n + 9, 7]}))
    tokenizer = tokenizer_from_folder(tmp_path)
    assert tokenizer.vocab_size == n + 301 and tokenizer.token_bytes(n + 299) == b""
    assert tokenizer.eos_token == "<|mine|>" and tokenizer.encode("a")[0] < n
    assert tokenizer.stop_ids == {n + 4, n + 9, 7, n + 1, n + 8}


def test_a_sentencepiece_model_of_the_same_name_is_still_one(tmp_path):
    model, _ = vocabularies.spm()
    (tmp_path / "tokenizer.model").write_bytes(model.serialized_model_proto())
    assert type(tokenizer_from_folder(tmp_path)).__name__ == "SpmTokenizer"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tokens: tokens[:9] + tokens[10:], "no token for some byte"),
        (lambda tokens: [*tokens, tokens[300]], f"line {len(TOKENS) + 1} "),
    ],
)
def test_damaged_ranks_are_refused(tmp_path, change, message):
    write_ranks(tmp_path / "tokenizer.model", change(TOKENS))
    with pytest.raises(StokerError, match=message):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize("line", ["YWI= 5\n", "?? 700\n", "YWI=\n"])
def test_malformed_lines_are_refused(tmp_path, line):
    write_ranks(tmp_path / "tokenizer.model", TOKENS[:700])
    with open(tmp_path / "tokenizer.model", "a") as file:
        file.write(line)
    with pytest.raises(StokerError, match=r"line \d+ of"):
        tokenizer_from_folder(tmp_path)


def test_ranks_of_unknown_models_are_refused(tmp_path):
    write_ranks(tmp_path / "qwen.tiktoken")
    with pytest.raises(StokerError, match=r"add the model's tokenizer\.json"):
        tokenizer_from_folder(tmp_path)
