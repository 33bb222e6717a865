"""`stoker chat`: a conversation that keeps its KV cache from turn to turn."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from absl import flags

from ..engine.accounting import memory_bandwidth
from ..engine.engine import Engine
from ..engine.replies import Reply
from ..models.errors import StokerError
from ..models.loading import Model
from ..models.tokenizers import encode_chat
from . import common
from .command import Command
from .stats import print_stats, reply_stats

#: Tokens of context where neither `--context` nor the model sets fewer.
DEFAULT_CONTEXT = 4096
HELP = "/reset forgets the conversation, /exit (or end of input) leaves, Ctrl-C ends a reply early."


def define_flags(values: flags.FlagValues) -> None:
    """The flags of this command."""
    common.define_model_flags(values)
    common.define_sampling_flags(values, temperature=0.2, top_p=0.9, max_tokens=512)
    common.define_chat_flags(values)


def run(values: flags.FlagValues, load: Callable[[], Model]) -> None:
    """Talks until the input ends."""
    params = common.sampling_params(values)
    template = common.chat_template(values)
    limit = memory_bandwidth() if values.stats else None
    model = load()
    tokenizer = common.tokenizer_of(model)
    start = [] if values.system is None else [{"role": "system", "content": values.system}]

    def encode(messages: list[dict[str, str]]) -> list[int]:
        return encode_chat(tokenizer, messages, template=template)

    encode([*start, {"role": "user", "content": "Hello"}])  # a template that fails, fails now
    engine = common.new_engine(values, model, DEFAULT_CONTEXT)
    engine.warmup()
    interactive = sys.stdin.isatty()
    if interactive:
        print(f"{model.name}, context {engine.context} tokens. {HELP}", file=sys.stderr)
    messages = list(start)
    for line in _lines(interactive):
        if line == "/exit":
            return
        if line == "/reset":
            messages = list(start)
            continue
        if line.startswith("/"):
            print(f"unknown command {line.split()[0]}. {HELP}", file=sys.stderr)
            continue
        asked = [*messages, {"role": "user", "content": line}]
        try:
            reply = _answer(engine, encode(asked), params)
        except StokerError as error:
            print(f"stoker chat: {error}; /reset starts afresh", file=sys.stderr)
            continue
        messages = [*asked, {"role": "assistant", "content": reply.text}]
        if limit:
            print_stats(reply_stats(engine, reply, limit))


def _answer(engine: Engine, ids: list[int], params: common.SamplingParams) -> Reply:
    """Streams one reply; an interruption keeps what was said so far."""
    stream = engine.stream(ids, params)
    try:
        for delta in stream:
            reply = delta.reply
            print(delta.text, end="", flush=True)
    except KeyboardInterrupt:
        stream.close()
    print(flush=True)
    return reply


def _lines(interactive: bool) -> Iterator[str]:
    if interactive:
        # Line editing and history for input(), where the platform has it.
        import contextlib
        import importlib

        with contextlib.suppress(ImportError):
            importlib.import_module("readline")
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            return
        except UnicodeDecodeError:
            raise StokerError("standard input is not UTF-8 text") from None
        if line:
            yield line


COMMAND = Command("chat", define_flags, run, common.open_model)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
