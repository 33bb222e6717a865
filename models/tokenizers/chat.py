"""A conversation to the prompt that a model was trained on, by the model's chat template."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError, UndefinedError

from ..errors import StokerError, one_line
from .base import Tokenizer
from .messages import checked_message, map_strings, marked, plain_copy, unused_character
from .sandbox import MAX_CHARS, TemplateEnvironment, TooMuchError

_MAX_TEMPLATE_CHARS = 1 << 20
_PROBE = "probe"

Message = Mapping[str, Any]


def render_chat(
    template: str,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
    tools: Sequence[Mapping[str, Any]] | None = None,
    **extra: Any,
) -> str:
    """The prompt of a conversation, as Hugging Face's `apply_chat_template` renders it.

    - Content is a string or a list of parts `{"type": "text", "text": ...}`. A template that goes
      through parts gets them as they are; for any other the texts are joined with a newline.
      A template that only knows parts gets a string as one part.
    - Content may be null or missing where there are `tool_calls`; the template then sees no
      `content`, or an empty one if it cannot do without.
    - Tool-call arguments that are a JSON object in a string become that object; where a template
      joins them to text, they read as the JSON they were.

    Args:
      template: Jinja source.
      messages: the conversation, each with `role` and `content`, in order; not changed.
      add_generation_prompt: end with the opening of the assistant's reply.
      bos_token: spelling of the begin token, which templates may write.
      eos_token: spelling of the end token.
      tools: JSON schemas of functions that the model may call.
      **extra: further variables of the template.

    Raises:
      StokerError: the template is wrong, refuses the messages (with its own words), reaches for
        what it must not, or takes more than 5 seconds or 8 Mi characters; or a message is
        malformed.
    """
    data = _prepare(template, messages, tools, extra)
    return _render(template, data, add_generation_prompt, bos_token, eos_token, kept_char="")


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    template: str | None = None,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **extra: Any,
) -> list[int]:
    """Token ids of a conversation (see `render_chat`).

    The template alone decides on begin and end tokens: none is added and none removed. Control
    tokens that the template writes are parsed; text in messages and tools that spells one stays
    plain text, so no message can end its own turn. Such text is marked with a noncharacter
    after its first character while the template runs, and the mark taken out of what is encoded.

    Args:
      tokenizer: encodes, and brings the template unless one is given.
      messages: the conversation.
      template: used in place of the tokenizer's own.
      add_generation_prompt: end with the opening of the assistant's reply.
      tools: JSON schemas of functions that the model may call.
      **extra: further variables of the template.

    Raises:
      StokerError: there is no template, or as `render_chat`.
    """
    source = tokenizer.chat_template if template is None else template
    if source is None:
        raise StokerError(
            "the model has no chat template; give one in a file, or continue plain text with "
            "--prompt and without --chat"
        )
    data = _prepare(source, messages, tools, extra)
    literals = tokenizer.control_literals
    mark = unused_character(source, data)
    data = map_strings(data, functools.partial(marked, literals=literals, mark=mark))
    text = _render(
        source,
        data,
        add_generation_prompt,
        tokenizer.bos_token,
        tokenizer.eos_token,
        kept_char=mark,
    )
    return tokenizer.encode_marked(text, mark)


class _StoppedError(StokerError):
    """A template took too much; trying it in another way would too."""


def _prepare(
    template: str,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """Checked copies, in plain types, of all that a template sees."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise StokerError("messages must be a list of at least one message")
    if tools is not None and not all(isinstance(tool, Mapping) for tool in tools):
        raise StokerError("tools must be a list of JSON schemas, each a JSON object")
    style = _content_style(template)
    return {
        "messages": [checked_message(i, message, style) for i, message in enumerate(messages)],
        "tools": None if tools is None else [plain_copy(tool) for tool in tools],
        "extra": plain_copy({"documents": None, **extra}),
    }


@functools.lru_cache(maxsize=16)
def _content_style(template: str) -> str:
    """How a template takes content: `string`, `parts`, or `both`, found by trying it.

    A template that fails on a plain conversation of one message counts as `string`.
    """
    shown = {}
    for style, content in (("string", _PROBE), ("parts", [{"type": "text", "text": _PROBE}])):
        message = {"role": "user", "content": content}
        data = {"messages": [message], "tools": None, "extra": {"documents": None}}
        try:
            text = _render(template, data, True, "", "", kept_char="")
        except _StoppedError:
            raise
        except StokerError:
            text = ""
        # A printed list shows its keys too.
        shown[style] = _PROBE in text and "'text'" not in text and '"text"' not in text
    if shown["parts"]:
        return "both" if shown["string"] else "parts"
    return "string"


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> types.CodeType:
    """Compiled once: large templates take longer to compile than to render."""
    if len(template) > _MAX_TEMPLATE_CHARS:
        raise StokerError(
            f"the chat template has {len(template)} characters; at most {_MAX_TEMPLATE_CHARS} are "
            "allowed"
        )
    return TemplateEnvironment().compile(template)


def _render(
    template: str,
    data: Mapping[str, Any],
    add_generation_prompt: bool,
    bos_token: str,
    eos_token: str,
    *,
    kept_char: str,
) -> str:
    variables = {
        "add_generation_prompt": add_generation_prompt,
        "bos_token": bos_token,
        "eos_token": eos_token,
        "tools": data["tools"],
        **data["extra"],
    }
    messages = data["messages"]
    try:
        code = _compile(template)
        try:
            return _run(code, {**variables, "messages": messages}, kept_char)
        except (UndefinedError, TypeError):
            filled = [{"content": "", **message} for message in messages]
            if filled == messages:
                raise
            return _run(code, {**variables, "messages": filled}, kept_char)
    except TemplateSyntaxError as error:
        raise StokerError(
            f"the chat template is not valid Jinja (line {error.lineno}: {one_line(error)})"
        ) from error
    except (TooMuchError, OverflowError, RecursionError, MemoryError) as error:
        raise _StoppedError(f"the chat template was stopped: {one_line(error)}") from error
    except SecurityError as error:
        raise StokerError(
            f"the chat template reaches for what it must not: {one_line(error)}"
        ) from error
    except TemplateError as error:
        if isinstance(error, UndefinedError):
            raise StokerError(
                f"the chat template fails on the messages: {one_line(error)}"
            ) from error
        raise StokerError(f"the chat template refuses the messages: {one_line(error)}") from error
    except StokerError:
        raise
    except Exception as error:
        # Whatever else template code can raise: a type, key, value or recursion error.
        raise StokerError(
            f"the chat template fails on the messages ({type(error).__name__}: {one_line(error)})"
        ) from error


def _run(code: types.CodeType, variables: dict[str, Any], kept_char: str) -> str:
    environment = TemplateEnvironment(kept_char)
    compiled = environment.template_class.from_code(
        environment, code, environment.make_globals(None)
    )
    parts, size = [], 0
    for part in compiled.generate(variables):
        size += len(part)
        if size > MAX_CHARS:
            raise TooMuchError(f"it writes more than {MAX_CHARS} characters")
        parts.append(part)
    return "".join(parts)
