"""Chat templates that try to leave Jinja's sandbox. Without a sandbox each of them creates its file."""

from __future__ import annotations

from pathlib import Path

from helpers.hostile.traps import Traps, change_json

_POPEN = "['os'].popen('SHELL').read()"
_BUILT = "['__builtins__']['open']('MARKER','w')"
_SEARCH = (
    "{% for c in FROM.__subclasses__() %}{% if c.__name__ == '_wrap_close' %}"
    "{{ c.__init__.__globals__['system']('SHELL') }}{% endif %}{% endfor %}"
)

TEMPLATES = {
    "cycler": "{{ cycler.__init__.__globals__.os.system('SHELL') }}",
    "joiner": "{{ joiner.__init__.__globals__.os.system('SHELL') }}",
    "namespace": "{{ namespace.__init__.__globals__.os.system('SHELL') }}",
    "lipsum": "{{ lipsum.__globals__" + _POPEN + " }}",
    "lipsum by item": "{{ lipsum['__globals__']" + _POPEN + " }}",
    "lipsum by escapes": r"{{ lipsum['\x5f\x5fglobals\x5f\x5f']" + _POPEN + " }}",
    "lipsum by sums": "{{ lipsum['__glo' + 'bals__']" + _POPEN + " }}",
    "lipsum by join": "{{ lipsum[['__glo', 'bals__']|join]" + _POPEN + " }}",
    "lipsum by format": "{{ lipsum['%sglobals%s'|format('__', '__')]" + _POPEN + " }}",
    "lipsum by reverse": "{{ lipsum['__slabolg__'|reverse]" + _POPEN + " }}",
    "lipsum by attr": "{{ (lipsum|attr('__globals__'))" + _POPEN + " }}",
    "lipsum by attr of attr": "{{ (lipsum|attr('__globals__')|attr('get')('os')).system('SHELL') }}",
    "lipsum by map": "{{ ([lipsum]|map(attribute='__globals__')|first)" + _POPEN + " }}",
    "lipsum by dotted map": "{{ ([cycler]|map(attribute='__init__.__globals__.os')|first).system('SHELL') }}",
    "by groupby": "{{ ([cycler]|groupby('__init__.__globals__.os.system')|first).grouper('SHELL') }}",
    "by sort": "{{ ([cycler]|sort(attribute='__init__')|first).__init__.__globals__.os.system('SHELL') }}",
    "by unique": "{{ ([cycler]|unique(attribute='__init__')|first).__init__.__globals__.os.system('SHELL') }}",
    "by max": "{{ ([cycler]|max(attribute='__init__.__name__')).__init__.__globals__.os.system('SHELL') }}",
    "by set": "{% set f = lipsum.__globals__ %}{{ f.os.system('SHELL') }}",
    "by with": "{% with f = lipsum.__globals__ %}{{ f.os.system('SHELL') }}{% endwith %}",
    "by call": "{% macro m() %}{{ caller() }}{% endmacro %}{% call m() %}"
    "{{ lipsum.__globals__.os.system('SHELL') }}{% endcall %}",
    "by a loop": "{% for f in [lipsum] %}{{ f.__globals__.os.system('SHELL') }}{% endfor %}",
    "by a default": "{% macro m(f=lipsum.__globals__) %}{{ f.os.system('SHELL') }}{% endmacro %}{{ m() }}",
    "by a condition": "{{ 'x' if lipsum.__globals__.os.system('SHELL') == 0 else 'y' }}",
    "by a slice": "{{ 'abc'[lipsum.__globals__.os.system('SHELL'):] }}",
    "by a filter block": "{% filter upper %}{{ lipsum.__globals__.os.system('SHELL') }}{% endfilter %}",
    "by generation": "{% for m in messages %}{{ lipsum.__globals__.os.system('SHELL') }}{% endfor %}",
    "a macro": "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__" + _BUILT + " }}",
    "a macro's environment": "{% macro m() %}{% endmacro %}{{ m._environment.__init__.__globals__" + _BUILT + " }}",
    "self": "{{ self.__init__.__globals__" + _BUILT + " }}",
    "self's context": "{{ self._TemplateReference__context.cycler.__init__.__globals__.os.system('SHELL') }}",
    "self's environment": "{{ self._TemplateReference__context.environment.__init__.__globals__" + _BUILT + " }}",
    "undefined": "{{ nothing.__init__.__globals__" + _BUILT + " }}",
    "undefined item": "{{ messages[0].nothing.__init__.__globals__" + _BUILT + " }}",
    "loop": "{% for x in [1] %}{{ loop.__class__.__init__.__globals__" + _BUILT + " }}{% endfor %}",
    "a word's class": _SEARCH.replace("FROM", "''.__class__.__mro__[1]"),
    "a number's class": _SEARCH.replace("FROM", "(1).__class__.__base__.__base__").replace(
        ".__base__.__base__", ".__base__"
    ),
    "a list's class": _SEARCH.replace("FROM", "[].__class__.__base__"),
    "a table's class": _SEARCH.replace("FROM", "{}.__class__.__bases__[0]"),
    "a tuple's class": _SEARCH.replace("FROM", "().__class__.__mro__[-1]"),
    "true's class": _SEARCH.replace("FROM", "true.__class__.__mro__[-1]"),
    "none's class": _SEARCH.replace("FROM", "none.__class__.__base__"),
    "range's class": _SEARCH.replace("FROM", "range(2).__class__.__base__"),
    "dict's base": _SEARCH.replace("FROM", "dict.__base__"),
    "a method's class": _SEARCH.replace("FROM", "[].append.__self__.__class__.__base__"),
    "the messages' class": _SEARCH.replace("FROM", "messages.__class__.__base__"),
    "a content's class": _SEARCH.replace("FROM", "messages[0].content.__class__.__base__"),
    "raise_exception": "{{ raise_exception.__globals__" + _BUILT + " }}",
    "raise_exception's name": "{{ raise_exception(lipsum.__globals__.os.system('SHELL')) }}",
    "strftime_now": "{{ strftime_now.__globals__" + _BUILT + " }}",
    "strftime_now's argument": "{{ strftime_now(lipsum.__globals__.os.popen('SHELL').read()) }}",
    "tojson": "{{ messages|tojson(indent=lipsum.__globals__.os.system('SHELL')) }}",
    "eos_token": _SEARCH.replace("FROM", "eos_token.__class__.__mro__[-1]"),
}
# Where a folder may keep its template.
PLACES = ["tokenizer_config.json", "chat_template.jinja", "list", "additional_chat_templates"]


def template(traps: Traps, name: str, trap: str) -> str:
    """Return a template of `TEMPLATES` with its file filled in."""
    return TEMPLATES[name].replace("SHELL", traps.shell(trap)).replace("MARKER", traps.marker(trap))


def use_template(folder: Path, text: str, place: str) -> None:
    """Make a text the chat template of a model folder."""
    if place == "tokenizer_config.json":
        change_json(folder / place, chat_template=text)
    elif place == "chat_template.jinja":
        (folder / place).write_text(text)
    elif place == "list":
        named = [{"name": name, "template": text} for name in ("default", "tool_use", "rag")]
        change_json(folder / "tokenizer_config.json", chat_template=named)
    else:
        (folder / place).mkdir()
        (folder / place / "default.jinja").write_text(text)
        (folder / "chat_template.jinja").write_text(text)
