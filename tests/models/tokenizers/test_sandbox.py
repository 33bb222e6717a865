"""Template code can neither reach Python nor spend time or memory without end."""

import time

import pytest

from stoker.models.errors import StokerError
from stoker.models.tokenizers import render_chat, sandbox

USER = [{"role": "user", "content": "x"}]


def message(template) -> str:
    with pytest.raises(StokerError) as error:
        render_chat(template, USER)
    text = str(error.value)
    assert "\n" not in text and len(text) < 700
    return text


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__'] }}{{ ''['__class__']['__mro__'] }}",
        "{{ ('' | attr('__class__')).__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ dict.__call__.__func__ }}",
        "{{ namespace(__class__=1) }}",
    ],
)
def test_python_is_out_of_reach(template):
    text = message(template)
    assert "must not" in text or "unsafe" in text or "undefined" in text


@pytest.mark.parametrize(
    "template",
    [
        "{{ ('{0.__class__}' | replace('q', '')).format(messages) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ namespace.__init__ }}",
        "{{ self.__init__ }}",
        "{{ messages[0] | attr('__class__') }}",
    ],
)
def test_internals_read_as_undefined(template):
    assert render_chat(template, USER) == ""


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ 'x' * 10**10 }}",
        "{{ 10**10 * ['x'] }}",
        "{{ 10**(10**9) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 999999999) }}",
        "{{ '%(a)s' * 100000 % {'a': 'x' * 1000000} }}",
        "{{ 'x' | center(10**9) }}",
        "{{ 'x'.ljust(10**9) }}",
        "{{ 'x'.zfill(10**9) }}",
        "{{ ('\\t' * 10000).expandtabs(100000) }}",
        "{{ ('x\\n' * 10000) | indent(100000) }}",
        "{{ [1] | tojson(indent=10**9) }}",
        "{{ 'x' | slice(10**9) | list }}",
        "{{ 'x' | batch(10**9, 'y') | list }}",
        "{{ ('x' * 100000) | replace('x', 'y' * 100000) }}",
        "{{ ('x' * 100000).replace('x', 'y' * 100000) }}",
        "{{ ('x' * 1000000) | wordwrap(1, wrapstring='y' * 1000) }}",
        "{{ ('y' * 100000).join('x' * 100000) }}",
        "{{ ('x' * 100000) | join('y' * 100000) }}",
        "{{ (['x' * 1000] * 1000) | map('center', 100000) | join }}",
        "{{ range(90000) | map('center', 8000000) | list | length }}",
        "{% set ns = namespace(x='xx') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}"
        "{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}"
        "{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
        "{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x='xx') %}{% for i in range(60) %}"
        "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
        "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns = namespace(x='xx') %}"
        "{% for i in range(60) %}{% set ns.x = f(ns.x) %}{% endfor %}",
        "{% set x = 'xxxxxxxxxx' * 700000 %}{{ (" + " ~ ".join("x" * 90) + ") | length }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set l = [0] * 9000 %}{{ [l] * 9000 }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxxxxxxxx{% endfor %}"
        "{% endfor %}",
    ],
)
def test_size_is_bounded(template):
    start = time.thread_time()
    text = message(template)
    assert time.thread_time() - start < 2 * sandbox.MAX_SECONDS
    assert "stopped" in text or "width" in text


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set l = range(9999) | list %}{% for i in l %}{% for j in l %}{% for k in l %}"
        "{% endfor %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(60) }}",
        "{% for x in [1] recursive %}{% if loop.depth < 50 %}{{ loop([1]) }}{{ loop([1]) }}"
        "{% endif %}{% endfor %}",
        "{% set l = [0] * 9000 %}{{ ([l] * 900) | sum(start=[]) | length }}",
        "{% for i in range(99999) %}{% set x = range(99999) | map('string') | list %}{% endfor %}",
    ],
)
def test_time_is_bounded(template, monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.3)
    start = time.thread_time()
    assert "0.3 seconds" in message(template)
    assert time.thread_time() - start < 5


def test_growth_is_refused_before_it_happens():
    """Each of these names what it refused, so it was not the result that was too large."""
    for name, made in (
        ("join", "('y' * 10000).join('x' * 1000)"),
        ("join", "('x' * 1000) | join('y' * 10000)"),
        ("replace", "('x' * 1000) | replace('x', 'y' * 10000)"),
        ("replace", "('x' * 1000).replace('x', 'y' * 10000)"),
        ("center", "'x' | center(10000000)"),
        ("ljust", "'x'.ljust(10000000)"),
        ("*", "'xx' * 5000000"),
    ):
        assert f"({name})" in message("{{ (" + made + ") | length }}")


def test_too_long_a_template_is_refused():
    assert "1048576" in message("x" * (1 << 20) + "y")


def test_a_long_conversation_is_well_inside_the_bounds():
    messages = [{"role": "user", "content": "word " * 100} for _ in range(2000)]
    template = (
        "{% for m in messages %}{% if loop.index0 == messages | length - 1 %}last{% endif %}"
        "{{ m.role + ': ' + m.content | trim ~ '\n' }}{% endfor %}"
    )
    start = time.thread_time()
    text = render_chat(template, messages)
    assert time.thread_time() - start < sandbox.MAX_SECONDS / 2
    assert text.count("word") == 200_000 and text.count("last") == 1
