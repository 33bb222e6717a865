"""A conversation to the prompt that a model was trained on, by the model's chat template."""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError, UndefinedError

from ..errors import StokerError
from .base import Tokenizer, without_surrogates
from .sandbox import MAX_CHARS, TemplateEnvironment, TooMuchError

_MAX_TEMPLATE_CHARS = 1 << 20
# Unicode's noncharacters: never part of interchanged text.
_NONCHARACTERS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
# Names that clients and templates have for a model's reasoning; the first is the standard one.
_REASONING = ("reasoning_content", "thinking", "reasoning")
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
    mark = _unused_character(source, data)
    data = _map_strings(data, functools.partial(_marked, literals=literals, mark=mark))
    text = _render(
        source,
        data,
        add_generation_prompt,
        tokenizer.bos_token,
        tokenizer.eos_token,
        kept_char=mark,
    )
    ids: list[int] = []
    for run, control_id in tokenizer.split_control(without_surrogates(text)):
        ids.extend(tokenizer.encode(run.replace(mark, ""), add_special=False))
        if control_id is not None:
            ids.append(control_id)
    return ids


class _StoppedError(StokerError):
    """A template took too much; trying it in another way would too."""


class _Arguments(dict[str, Any]):
    """Arguments of a tool call: a mapping that reads as JSON where it is joined to text."""

    json_text = "{}"

    def __str__(self) -> str:
        return self.json_text

    def __add__(self, other: Any) -> Any:
        return self.json_text + other if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return other + self.json_text if isinstance(other, str) else NotImplemented


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
        "messages": [_message(i, message, style) for i, message in enumerate(messages)],
        "tools": None if tools is None else [_plain(tool) for tool in tools],
        "extra": _plain({"documents": None, **extra}),
    }


def _message(index: int, message: Any, style: str) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise StokerError(f"{where} is of type {type(message).__name__}, not an object with a role")
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise StokerError(
            f"{where} has the role {message.get('role')!r}; give a text such as 'user'"
        )
    plain: dict[str, Any] = {
        key: _plain(value) for key, value in message.items() if value is not None
    }
    if "tool_calls" in plain:
        plain["tool_calls"] = _tool_calls(where, plain["tool_calls"])
    content = plain.get("content")
    if content is None:
        if not plain.get("tool_calls"):
            raise StokerError(f"{where} has no content; give a text, if only an empty one")
    elif isinstance(content, list):
        parts = [_text_part(where, part) for part in content]
        if style == "string":
            plain["content"] = "\n".join(part["text"] for part in parts)
    elif not isinstance(content, str):
        raise StokerError(
            f"{where} has content of type {type(content).__name__}; give a text or a list of text "
            "parts"
        )
    elif style == "parts":
        plain["content"] = [{"type": "text", "text": content}]
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _text_part(where: str, part: Any) -> dict[str, Any]:
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise StokerError(
            f"{where} has a content part of type '{kind}' that is not text; only "
            '{"type": "text", "text": "..."} is supported'
        )
    return {"type": "text", **part}


def _tool_calls(where: str, calls: Any) -> list[Any]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise StokerError(f"{where} has tool_calls that are not a list of objects")
    result = []
    for call in calls:
        if isinstance(call.get("function"), dict):
            call = {**call, "function": _with_arguments(where, call["function"])}
        else:
            call = _with_arguments(where, call)
        result.append(call)
    return result


def _with_arguments(where: str, function: dict[str, Any]) -> dict[str, Any]:
    if "arguments" not in function:
        return function
    given = function["arguments"]
    value = given
    if isinstance(given, str):
        try:
            value = json.loads(given) if given.strip() else {}
        except ValueError:
            value = None
    if not isinstance(value, dict):
        raise StokerError(
            f"{where} has tool-call arguments {given!r:.80}; give a JSON object, as an object or "
            "in a string"
        )
    arguments = _Arguments(value)
    is_text = isinstance(given, str) and given.strip()
    arguments.json_text = given if is_text else json.dumps(value, ensure_ascii=False)
    return {**function, "arguments": arguments}


def _plain(value: Any) -> Any:
    """A copy in JSON's types only, so that a template can reach no methods but theirs."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Iterable):
        return [_plain(item) for item in value]
    raise StokerError(
        f"a chat message holds a value of type {type(value).__name__}; give JSON values only"
    )


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
            f"the chat template is not valid Jinja (line {error.lineno}: {_line(error)})"
        ) from error
    except (TooMuchError, OverflowError, RecursionError, MemoryError) as error:
        raise _StoppedError(f"the chat template was stopped: {_line(error)}") from error
    except SecurityError as error:
        raise StokerError(
            f"the chat template reaches for what it must not: {_line(error)}"
        ) from error
    except TemplateError as error:
        if isinstance(error, UndefinedError):
            raise StokerError(f"the chat template fails on the messages: {_line(error)}") from error
        raise StokerError(f"the chat template refuses the messages: {_line(error)}") from error
    except StokerError:
        raise
    except Exception as error:
        # Whatever else template code can raise: a type, key, value or recursion error.
        raise StokerError(
            f"the chat template fails on the messages ({type(error).__name__}: {_line(error)})"
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


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy with every string in it, keys included, changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        items = {
            _map_strings(key, change): _map_strings(item, change) for key, item in value.items()
        }
        if isinstance(value, _Arguments):
            items = _Arguments(items)
            items.json_text = change(value.json_text)
        return items
    if isinstance(value, list):
        return [_map_strings(item, change) for item in value]
    return value


def _marked(text: str, *, literals: Iterable[str], mark: str) -> str:
    """The text with a mark after the first character of each control literal in it.

    So is the beginning of a literal at the end of the text, which what follows could complete.
    """
    cuts = set()
    end = len(text.rstrip())
    for literal in literals:
        start = text.find(literal)
        while start >= 0:
            cuts.add(start + 1)
            start = text.find(literal, start + 1)
        for length in range(1, min(len(literal), end + 1)):
            for stop in {end, len(text)}:
                if stop >= length and text.startswith(literal[:length], stop - length):
                    cuts.add(stop - length + 1)
    pieces, last = [], 0
    for cut in sorted(cuts):
        pieces.append(text[last:cut])
        last = cut
    return mark.join([*pieces, text[last:]])


def _unused_character(template: str, data: Mapping[str, Any]) -> str:
    """A noncharacter that neither the template nor the messages contain."""
    seen = set(template)

    def see(text: str) -> str:
        seen.update(text)
        return text

    _map_strings(data, see)
    for character in _NONCHARACTERS:
        if character not in seen:
            return character
    raise StokerError("the messages contain all 32 noncharacters U+FDD0 to U+FDEF; remove one")
