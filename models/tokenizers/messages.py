"""Checked messages in plain types, and the marking of control-token text in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..errors import StokerError

# Unicode's noncharacters: never part of interchanged text.
_NONCHARACTERS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
# Names that clients and templates have for a model's reasoning; the first is the standard one.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class Arguments(dict[str, Any]):
    """Arguments of a tool call: a mapping that reads as JSON where it is joined to text."""

    json_text = "{}"

    def __str__(self) -> str:
        return self.json_text

    def __add__(self, other: Any) -> Any:
        return self.json_text + other if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return other + self.json_text if isinstance(other, str) else NotImplemented


def checked_message(index: int, message: Any, style: str) -> dict[str, Any]:
    """A copy of a message that suits templates of a content style: `string`, `parts` or `both`.

    Raises:
      StokerError: it is malformed; the sentence names it by its index.
    """
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise StokerError(f"{where} is of type {type(message).__name__}, not an object with a role")
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise StokerError(
            f"{where} has the role {message.get('role')!r}; give a text such as 'user'"
        )
    plain: dict[str, Any] = {
        key: plain_copy(value) for key, value in message.items() if value is not None
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
    arguments = Arguments(value)
    is_text = isinstance(given, str) and given.strip()
    arguments.json_text = given if is_text else json.dumps(value, ensure_ascii=False)
    return {**function, "arguments": arguments}


def plain_copy(value: Any) -> Any:
    """A copy in JSON's types only, so that a template can reach no methods but theirs."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {plain_copy(key): plain_copy(item) for key, item in value.items()}
    if isinstance(value, Iterable):
        return [plain_copy(item) for item in value]
    raise StokerError(
        f"a chat message holds a value of type {type(value).__name__}; give JSON values only"
    )


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy with every string in it, keys included, changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        items = {map_strings(key, change): map_strings(item, change) for key, item in value.items()}
        if isinstance(value, Arguments):
            items = Arguments(items)
            items.json_text = change(value.json_text)
        return items
    if isinstance(value, list):
        return [map_strings(item, change) for item in value]
    return value


def marked(text: str, *, literals: Iterable[str], mark: str) -> str:
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


def unused_character(template: str, data: Mapping[str, Any]) -> str:
    """A noncharacter that neither the template nor the messages contain."""
    seen = set(template)

    def see(text: str) -> str:
        seen.update(text)
        return text

    map_strings(data, see)
    for character in _NONCHARACTERS:
        if character not in seen:
            return character
    raise StokerError("the messages contain all 32 noncharacters U+FDD0 to U+FDEF; remove one")
