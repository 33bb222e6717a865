"""`stoker generate`: a reply to one prompt, streamed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from absl import flags

from ..engine.accounting import memory_bandwidth
from ..engine.replies import Reply
from ..models.errors import StokerError
from ..models.loading import Model
from ..models.tokenizers import encode_chat
from . import common
from .command import Command
from .stats import print_stats, reply_stats


def define_flags(values: flags.FlagValues) -> None:
    """The flags of this command."""
    common.define_model_flags(values)
    common.define_sampling_flags(values)
    flags.DEFINE_string(
        "prompt",
        None,
        "Text to continue or, with --chat, to answer; - reads it from standard input.",
        flag_values=values,
    )
    flags.DEFINE_list(
        "prompt_ids", None, "Token ids to continue, taken as they are: 1,2,3.", flag_values=values
    )
    flags.DEFINE_boolean(
        "chat", False, "Put --prompt into the model's chat template.", flag_values=values
    )
    common.define_chat_flags(values)
    flags.DEFINE_boolean(
        "parse_special",
        False,
        "Text in --prompt that spells a control token, such as <|im_end|>, becomes that token.",
        flag_values=values,
    )
    flags.DEFINE_boolean(
        "json", False, "Print one JSON object instead of streaming text.", flag_values=values
    )


def run(values: flags.FlagValues, load: Callable[[], Model]) -> None:
    """Generates and prints."""
    _check(values)
    params = common.sampling_params(values)
    ids = _given_ids(values)
    text = None if ids is not None else _given_text(values)
    limit = memory_bandwidth() if values.stats else None
    model = load()
    if text is not None:
        ids = _encode(values, model, text)
    assert ids is not None
    engine = common.new_engine(values, model, len(ids) + values.max_tokens)
    engine.check(ids, params)
    engine.warmup(len(ids))
    for delta in engine.stream(ids, params):
        reply = delta.reply
        if not values.json:
            print(delta.text, end="", flush=True)
    stats = reply_stats(engine, reply, limit) if limit else None
    if values.json:
        print(json.dumps(reply_json(model, reply) | ({"stats": stats} if stats else {})))
    else:
        print()
        if stats:
            print_stats(stats)


def reply_json(model: Model, reply: Reply) -> dict[str, object]:
    """The object that `--json` prints."""
    return {
        "model": model.name,
        "text": reply.text,
        "prompt_ids": reply.prompt_ids,
        "ids": reply.ids,
        "logprobs": reply.choices[0].logprobs,
        "finish_reason": reply.finish_reason,
        "ttft_s": reply.times.ttft_s,
        "decode_tok_s": 1 / reply.tpot_s if reply.tpot_s else 0.0,
    }


def _check(values: flags.FlagValues) -> None:
    if (values.prompt is None) == (values.prompt_ids is None):
        raise StokerError("give either --prompt=TEXT (- for standard input) or --prompt_ids=1,2,3")
    if values.chat and values.prompt_ids is not None:
        raise StokerError("--chat puts text into a template; it takes --prompt, not --prompt_ids")
    if values.parse_special and (values.chat or values.prompt is None):
        raise StokerError(
            "--parse_special is for a plain --prompt; a chat template has its own rule"
        )
    for name in ("system", "chat_template"):
        if values[name].value is not None and not values.chat:
            raise StokerError(f"--{name} is part of a chat; add --chat")


def _given_ids(values: flags.FlagValues) -> list[int] | None:
    if values.prompt_ids is None:
        return None
    try:
        return [int(token) for token in values.prompt_ids]
    except ValueError:
        given = ",".join(values.prompt_ids)
        raise StokerError(f"--prompt_ids={given}: it takes whole numbers, 1,2,3") from None


def _given_text(values: flags.FlagValues) -> str:
    if values.prompt == "-":
        return common.read_text("prompt", "-")
    # What the shell passed may not be text: Python keeps such bytes as lone surrogates.
    if any("\ud800" <= character <= "\udfff" for character in values.prompt):
        raise StokerError("--prompt is not UTF-8 text")
    return values.prompt


def _encode(values: flags.FlagValues, model: Model, text: str) -> list[int]:
    if not values.chat:
        ids = common.tokenizer_of(model).encode(text, parse_special=values.parse_special)
        if not ids:
            raise StokerError(
                "the prompt is empty, and this model has no begin token to start from"
            )
        return ids
    system = [] if values.system is None else [{"role": "system", "content": values.system}]
    messages = [*system, {"role": "user", "content": text}]
    return encode_chat(common.tokenizer_of(model), messages, template=common.chat_template(values))


COMMAND = Command("generate", define_flags, run, common.open_model)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
