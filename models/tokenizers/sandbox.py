"""A Jinja environment for chat templates, which are code that came with a model file.

It is Hugging Face's environment (immutable sandbox, block trimming, loop controls, `tojson`,
`raise_exception`, `strftime_now`, the `generation` block) with bounds on time and memory:

- the clock is read at every item of every `for` loop, at every call (macros, methods, recursive
  loops), operator and filter, all of which run through here;
- every value that a call, an operator, a filter, a `set` or a concatenation makes or takes has a
  largest size, and all texts made in one rendering together have one;
- operators, methods and filters that can make much out of little (`*`, `**`, `%`, `replace`,
  `join`, widths ...) are measured before they run;
- `range` is limited to 100,000 items by the sandbox itself.

The caller bounds the output by taking it piece by piece.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

from jinja2 import Environment, ext, filters, nodes, sandbox
from jinja2.exceptions import SecurityError, TemplateError, TemplateRuntimeError
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.utils import Namespace

MAX_CHARS = 8 << 20
MAX_SECONDS = 5.0
_MAX_CHARS_MADE = 1 << 29
_MAX_BITS = 4_096
# A width of four digits, or one that is computed.
_WIDE_PERCENT = re.compile(r"%[^A-Za-z%]*(?:\d{4}|\*)")
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(?:\d{4}|\{)")
# Filters that give back no more than they are given, and are cheap however large that is.
_HARMLESS = frozenset({"length", "count", "first", "last", "default", "d", "reverse", "items"})


class TooMuchError(TemplateRuntimeError):
    """A template went over its time or size."""


class GenerationBlock(ext.Extension):
    """`{% generation %}` ... `{% endgeneration %}`, which marks replies for training: its body."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        """Parses the block to a scope with the body in it."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class TemplateEnvironment(sandbox.ImmutableSandboxedEnvironment):
    """The environment of one rendering; the module's docstring says what it bounds.

    Args:
      kept_char: a character that `tojson` never escapes, or the empty string.
    """

    # None of these is computed while compiling, where no bound holds.
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, kept_char: str = "") -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlock, ext.loopcontrols],
            optimized=False,
        )
        self._deadline = time.monotonic() + MAX_SECONDS
        self._chars_made = 0
        self._kept_char = kept_char
        self.filters["tojson"] = self._tojson
        self.filters["sum"] = self._sum
        self.filters = {name: self._bounded(name, f) for name, f in self.filters.items()}
        self.filters["_items"] = functools.partial(_Items, self._check_time)
        self.filters["_value"] = self._checked
        # Text at random has no place in a prompt.
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _TemplateDict()
        self.globals["namespace"] = TemplateNamespace

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parses, and puts checks where jinja2 has no hook of its own."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = _filter(loop.iter, "_items")
        for assign in tree.find_all(nodes.Assign):
            assign.node = _filter(assign.node, "_value")
        for block in tree.find_all(nodes.AssignBlock):
            block.filter = _filter(block.filter, "_value", lineno=block.lineno)
        for compare in tree.find_all(nodes.Compare):
            compare.expr = _filter(compare.expr, "_value")
        for concat in tree.find_all(nodes.Concat):
            concat.nodes = [_filter(child, "_value") for child in concat.nodes]
        for output in tree.find_all(nodes.Output):
            output.nodes = [
                child if isinstance(child, nodes.TemplateData) else _filter(child, "_value")
                for child in output.nodes
            ]
        return tree

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a macro, a method or a function for the template."""
        self._check_time()
        method = getattr(obj, "__wrapped__", obj)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            name = getattr(method, "__name__", "")
            if name == "join" and args:
                args = (self._joinable(args[0], owner), *args[1:])
            self._check_growth(name, owner, args, kwargs)
        return self._checked(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Applies an operator for the template, if its result is not too large."""
        self._check_time()
        if operator in ("*", "**"):
            self._check_product(operator, left, right)
        elif operator == "%" and isinstance(left, str):
            self._check_growth("%", left, (right,), {})
        return self._checked(super().call_binop(context, operator, left, right))

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise TooMuchError(f"it runs for more than {MAX_SECONDS:g} seconds")

    def _checked(self, value: Any) -> Any:
        """The value, if its tree has at most `MAX_CHARS` characters and items."""
        if isinstance(value, str):
            self._chars_made += len(value)
            if len(value) > MAX_CHARS or self._chars_made > _MAX_CHARS_MADE:
                raise TooMuchError(f"it makes a text of more than {MAX_CHARS} characters")
        elif isinstance(value, (list, tuple, dict)):
            self._check_time()
            _weight(value)
        return value

    def _check_growth(
        self, name: str, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Refuses a method, filter or format of a text that would make far more of it."""
        values = (*args, *kwargs.values())
        if name in ("center", "ljust", "rjust", "zfill", "slice", "batch"):
            times = 1
        elif name == "replace":
            old = args[0] if args else kwargs.get("old")
            times = text.count(old) if isinstance(old, str) else 0
        elif name in ("indent", "expandtabs", "tojson"):
            times = text.count("\n") + text.count("\t") + 1
        elif name in ("wordwrap", "translate"):
            times = len(text)
        elif name in ("%", "format", "format_map"):
            wide = _WIDE_BRACES if "format" in name and "%" not in text else _WIDE_PERCENT
            if wide.search(text) or _WIDE_BRACES.search(text):
                raise TooMuchError("it formats with a width that is computed or above 999")
            times = text.count("%") + text.count("{")
        else:
            return
        each = max((abs(v) if isinstance(v, int) else _weight(v) for v in values), default=0)
        if times * each > MAX_CHARS:
            raise TooMuchError(f"it makes a text of more than {MAX_CHARS} characters ({name})")

    def _check_product(self, operator: str, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (abs(right) if operator == "**" else 1)
            if bits + right.bit_length() > _MAX_BITS:
                raise TooMuchError(f"it computes a number of more than {_MAX_BITS} bits")
        for value, times in ((left, right), (right, left)):
            repeats = isinstance(value, (str, list, tuple)) and isinstance(times, int)
            if repeats and _weight(value) * times > MAX_CHARS:
                raise TooMuchError(f"it makes a value of more than {MAX_CHARS} items (*)")

    def _joinable(self, iterable: Any, separator: str) -> list[Any]:
        """The items as a list, if their texts joined are not too long."""
        items, size = [], 0
        for item in iterable:
            self._check_time()
            size += _weight(item) + len(separator)
            if size > MAX_CHARS:
                raise TooMuchError(f"it makes a text of more than {MAX_CHARS} characters (join)")
            items.append(item)
        return items

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter with its argument and result checked."""
        if name in _HARMLESS:
            return function

        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self._check_time()
            # The environment or a context comes first for some filters.
            first = int(bool(args) and isinstance(args[0], (Environment, Context, EvalContext)))
            head, values = args[:first], args[first:]
            for value in values:
                self._checked(value)
            if name == "join" and values:
                separator = values[1] if len(values) > 1 else kwargs.get("d", "")
                values = (self._joinable(values[0], str(separator)), *values[1:])
            elif values:
                text = values[0] if isinstance(values[0], str) else ""
                self._check_growth(name, text, values[1:], kwargs)
            return self._checked(function(*head, *values, **kwargs))

        return bounded

    def _sum(
        self, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0
    ) -> Any:
        get = filters.make_attrgetter(self, attribute)
        context: Any = None
        for item in iterable:
            value = item if attribute is None else get(item)
            start = self.call_binop(context, "+", start, value)
        return start

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Plain JSON, not escaped for HTML as jinja2's own is."""
        text = json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )
        if ensure_ascii and self._kept_char:
            text = text.replace(f"\\u{ord(self._kept_char):04x}", self._kept_char)
        return text


class TemplateNamespace(Namespace):
    """`namespace()` without names that begin with an underscore, as Hugging Face has it."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # As jinja2 has it, so that `self` may be a name in it.
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


class _Items:
    """What a `for` loop goes through: the same items, with a look at the clock before each."""

    def __init__(self, check_time: Callable[[], None], iterable: Any) -> None:
        self._check_time = check_time
        self._iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable:
            self._check_time()
            yield item

    def __len__(self) -> int:
        return len(self._iterable)


class _TemplateDict:
    """`dict` for templates: makes dictionaries and has nothing else to reach."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


def _filter(node: nodes.Node | None, name: str, lineno: int = 1) -> nodes.Filter:
    return nodes.Filter(
        node, name, [], [], None, None, lineno=node.lineno if node is not None else lineno
    )


def _weight(value: Any, spent: int = 0) -> int:
    """One for each character and item in a value's tree, added to `spent`.

    A list that holds another twice counts it twice, as it would be printed twice.

    Raises:
      TooMuchError: it is more than `MAX_CHARS`.
    """
    spent += 1
    if isinstance(value, str):
        spent += len(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            spent = _weight(item, _weight(key, spent))
    elif isinstance(value, (list, tuple)):
        for item in value:
            spent = _weight(item, spent)
    if spent > MAX_CHARS + 1:
        raise TooMuchError(f"it makes a value of more than {MAX_CHARS} characters and items")
    return spent


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have an attribute named {name!r}")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
