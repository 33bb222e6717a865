"""The tokenizer of a Hugging Face model folder, from all the files that say something of it."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2

from ..errors import StokerError
from ..json_files import read_json, read_text
from .base import Tokenizer, TokenType, Vocabulary
from .bpe import BpeTokenizer
from .fast import FastTokenizer, check_template, engine_of, read_pieces
from .spm import SpmTokenizer
from .tiktoken import convention_of, is_tiktoken, merges_of, pieces_of, read_ranks

FAST, SPM = "tokenizer.json", "tokenizer.model"
#: Files with special tokens and settings, the first having the last word.
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
_TEMPLATE, _OLD_TEMPLATE = "chat_template.jinja", "chat_template.json"
# The generated module makes its classes at run time; type checkers see none of them.
_proto: Any = sentencepiece_model_pb2


def tokenizer_from_folder(folder: pathlib.Path) -> Tokenizer:
    """Builds the tokenizer of a model folder.

    - `tokenizer.json`, or without it `tokenizer.model` (SentencePiece BPE, or Llama 3's ranks as
      the tiktoken library reads them) or `o200k_base.tiktoken` (GPT-OSS) has the tokens.
    - `tokenizer_config.json` has the begin and end tokens and a chat template, before which goes
      `chat_template.jinja`. Whether `encode` adds begin and end tokens is for the post-processor
      of `tokenizer.json` to say (as in transformers from version 5 on); for `tokenizer.model`,
      which has none, the settings do.
    - A reply ends at the end tokens of `tokenizer_config.json`, `config.json` and
      `generation_config.json` together.

    Raises:
      StokerError: a file is missing, damaged or not supported.
    """
    settings: dict[str, Any] = {}
    for name in reversed(_SETTINGS):
        settings |= _optional(folder / name)
    if (folder / FAST).is_file():
        return _fast(folder, settings)
    if (folder / SPM).is_file() and not is_tiktoken(folder / SPM):
        return _sentencepiece(folder, settings)
    ranked = [path for path in (folder / SPM, *sorted(folder.glob("*.tiktoken"))) if path.is_file()]
    if ranked:
        return _tiktoken(folder, settings, ranked[0])
    raise StokerError(f"'{folder}' has no {FAST} or {SPM}; add the tokenizer's files")


def _fast(folder: pathlib.Path, settings: Mapping[str, Any]) -> Tokenizer:
    source, values = read_text(folder / FAST), read_json(folder / FAST)
    model = values.get("model")
    if isinstance(model, dict) and model.get("dropout"):
        # Random merges, which training may use.
        values["model"] = {**model, "dropout": None}
        source = json.dumps(values)
    engine = engine_of(source)
    check_template(values)
    tokens, types = read_pieces(values, engine)
    vocabulary = _vocabulary(folder, settings, tokens, types, _surroundings(engine))
    return FastTokenizer(source, values, vocabulary)


def _surroundings(engine: Any) -> list[list[int]]:
    """The special tokens that the post-processor puts before and after a text."""
    plain, whole = (engine.encode("a", add_special_tokens=special).ids for special in (False, True))
    places = range(len(whole) - len(plain) + 1)
    start = next((i for i in places if whole[i : i + len(plain)] == plain), 0)
    return [whole[:start], whole[start + len(plain) :]]


def _sentencepiece(folder: pathlib.Path, settings: Mapping[str, Any]) -> Tokenizer:
    path = folder / SPM
    model = _proto.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except OSError as error:
        raise StokerError(f"'{path}' cannot be read ({error.strerror or error})") from None
    except DecodeError:
        raise StokerError(f"'{path}' is not a SentencePiece model; download it again") from None
    if model.trainer_spec.model_type != _proto.TrainerSpec.BPE:
        raise StokerError(f"'{path}' is not a BPE model, which is not supported; add {FAST}")
    normalizer = model.normalizer_spec
    if normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces:
        raise StokerError(f"'{path}' normalises text, which is not supported; add {FAST}")
    tokens = [piece.piece for piece in model.pieces]
    types = [TokenType(piece.type) for piece in model.pieces]
    scores = [piece.score for piece in model.pieces]
    for token, token_id in _added(folder, settings).items():
        if token not in tokens:
            missing = token_id + 1 - len(tokens)
            if not 0 < missing < 1 << 16:
                raise StokerError(
                    f"added token '{token}' has the id {token_id}, which is not past the "
                    f"{len(tokens)} of '{path}'; download the tokenizer again"
                )
            tokens += ["" for _ in range(missing)]
            types += [TokenType.UNUSED] * missing
            scores += [0.0] * missing
            tokens[token_id], types[token_id] = token, TokenType.CONTROL
    around: list[list[int]] = []
    for name, spelling, default in (("bos", "<s>", True), ("eos", "</s>", False)):
        token = _spelling(settings.get(f"{name}_token", spelling))
        added = settings.get(f"add_{name}_token", default) and token in tokens
        around.append([tokens.index(token)] if added else [])
    vocabulary = _vocabulary(folder, settings, tokens, types, around)
    return SpmTokenizer(vocabulary, scores, normalizer.add_dummy_prefix)


def _tiktoken(folder: pathlib.Path, settings: Mapping[str, Any], path: pathlib.Path) -> Tokenizer:
    convention, ranks = convention_of(path), read_ranks(path)
    special = dict(enumerate(convention.special, len(ranks)))
    # What the folder says of its own tokens has the last word.
    special |= {i: token for token, i in _added(folder, settings).items() if i >= len(ranks)}
    if max(special) >= len(ranks) + (1 << 16):
        raise StokerError(
            f"added token '{special[max(special)]}' has the id {max(special)}, far past the "
            f"{len(ranks)} of '{path}'; download the tokenizer again"
        )
    tokens, types = pieces_of(ranks, special)
    settings = {"bos_token": convention.begin, "eos_token": convention.end} | dict(settings)
    ids = {token: i for i, token in special.items()}
    begin = ids.get(_spelling(settings["bos_token"]))
    added = settings.get("add_bos_token", convention.adds_begin)
    around = [[begin] if added and begin is not None else [], []]
    vocabulary = _vocabulary(folder, settings, tokens, types, around)
    stops = {ids[token] for token in convention.stops if token in ids}
    vocabulary = dataclasses.replace(vocabulary, stop_ids=vocabulary.stop_ids | stops)
    return BpeTokenizer(vocabulary, merges_of(ranks), convention.rule)


def _added(folder: pathlib.Path, settings: Mapping[str, Any]) -> dict[str, int]:
    """Tokens beside a `tokenizer.model`, by id."""
    found = dict(_optional(folder / "added_tokens.json"))
    decoder = settings.get("added_tokens_decoder")
    for token_id, entry in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(entry, dict) and str(token_id).isdecimal():
            found[_spelling(entry)] = int(token_id)
    ordered = sorted(found.items(), key=lambda item: item[1] if type(item[1]) is int else -1)
    return {token: i for token, i in ordered if type(i) is int and i >= 0 and token}


def _vocabulary(
    folder: pathlib.Path,
    settings: Mapping[str, Any],
    tokens: list[str],
    types: list[TokenType],
    around: list[list[int]],
) -> Vocabulary:
    """The vocabulary; `around` is what the tokenizer's own file puts before and after a text."""
    ids = {token: i for i, token in enumerate(tokens) if token}
    configs = {name: _optional(folder / name) for name in ("config.json", "generation_config.json")}
    bos_id = ids.get(_spelling(settings.get("bos_token")))
    eos_id = ids.get(_spelling(settings.get("eos_token")))
    declared = {
        name: [
            token_id
            for file, config in configs.items()
            for token_id in _ids(file, f"{name}_token_id", config, len(tokens))
        ]
        for name in ("bos", "eos")
    }
    if bos_id is None:
        bos_id = next(iter(declared["bos"]), None)
    if eos_id is None:
        eos_id = next(iter(declared["eos"]), None)
    before, after = around
    bos_id = before[0] if before else bos_id
    eos_id = after[0] if after else eos_id
    if len(before) > 1 or len(after) > 1:
        raise StokerError(
            f"{FAST} puts the tokens {before} and {after} around a text, which is not supported; "
            "give a model whose tokenizer adds at most a begin and an end token"
        )
    stop_ids = {eos_id, *declared["eos"]} - {None}
    template, template_source = _chat_template(folder, settings)
    return Vocabulary(
        tokens=tuple(tokens),
        types=tuple(types),
        bos_id=bos_id,
        eos_id=eos_id,
        stop_ids=frozenset(i for i in stop_ids if i is not None),
        add_bos=bool(before),
        add_eos=bool(after),
        chat_template=template,
        template_source=template_source,
    )


def _ids(file: str, key: str, config: Mapping[str, Any], size: int) -> list[int]:
    """The token ids of a key, which holds one, a list of them, or none."""
    value = config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < size:
            raise StokerError(
                f"{file}: '{key}' is {value!r:.40}, which the {size} tokens of the vocabulary do "
                "not hold; download the model again"
            )
    return ids


def _spelling(token: Any) -> str:
    """A special token as the settings have it: a text, or an object with its `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def _chat_template(folder: pathlib.Path, settings: Mapping[str, Any]) -> tuple[str | None, str]:
    """The template and where it is from: a file of its own, or else the settings.

    The settings hold a text, or named ones of which `default` serves. Templates with other names
    (for tools or retrieval; also those in `additional_chat_templates`) are not for plain chats.
    """
    if (folder / _TEMPLATE).is_file():
        return read_text(folder / _TEMPLATE), _TEMPLATE
    # Processors' older file, as transformers still reads it; it goes before the settings.
    for name, values in (
        (_OLD_TEMPLATE, _optional(folder / _OLD_TEMPLATE)),
        (_SETTINGS[0], settings),
    ):
        template = values.get("chat_template")
        if isinstance(template, list):
            entries = [entry for entry in template if isinstance(entry, dict)]
            template = {entry.get("name"): entry.get("template") for entry in entries}
        if isinstance(template, dict):
            template, name = template.get("default"), f"{name} (default)"
        if isinstance(template, str):
            return template, name
    return None, ""


def _optional(path: pathlib.Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
