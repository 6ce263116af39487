"""Answers and truths that are code: each creates its file if anything runs it as Python, LaTeX or a shell would."""

from __future__ import annotations

from collections.abc import Iterator

from helpers.hostile.traps import Traps

PYTHON = {
    "open": "open('MARKER','w')",
    "os": "__import__('os').system('SHELL')",
    "builtins": "__builtins__['open']('MARKER','w')",
    "getattr": "getattr(__import__('os'),'sys'+'tem')('SHELL')",
    "eval": "eval(\"open('MARKER','w')\")",
    "exec": "exec(\"open('MARKER','w')\")",
    "compile": "eval(compile(\"open('MARKER','w')\",'','eval'))",
    "lambda": "(lambda: open('MARKER','w'))()",
    "list": "[open(p,'w') for p in ['MARKER']]",
    "class": "[c for c in object.__subclasses__() if 'wrap_close' in str(c)][0].close.__globals__['system']('SHELL')",
    "sympy": "sympify(\"open('MARKER','w')\")",
    "symbol": "Symbol('x').__class__.__init__.__globals__['__builtins__']['open']('MARKER','w')",
    "format": "f\"{open('MARKER','w')}\"",
    "walrus": "(f:=open('MARKER','w'))",
    "or": "0 or open('MARKER','w')",
    "sum": "2+len([open('MARKER','w')])-1",
    "power": "2**len([open('MARKER','w')])",
    "import path": "__import__('pathlib').Path('MARKER').touch()",
    "subprocess": "__import__('subprocess').call(['touch','MARKER'])",
    "pickle": "__import__('pickle').loads(bytes.fromhex('PICKLE'))",
    "semicolon": "2; open('MARKER','w')",
    "newline": "2\nopen('MARKER','w')",
    "comment": "2 #\nopen('MARKER','w')",
    "triple": "''';open('MARKER','w');'''",
    "quote": "2');open('MARKER','w');('",
    "double quote": '2");open("MARKER","w");("',
    "bracket": "2]);open('MARKER','w');([",
    "index": "[1,2][open('MARKER','w') and 0]",
    "comparison": "2 == open('MARKER','w')",
    "wide letters": "ｏｐｅｎ('MARKER','w')",
}
OTHER = {
    "write18": r"\immediate\write18{SHELL}",
    "input": r"\input{|SHELL}",
    "openout": r"\newwrite\f\immediate\openout\f=MARKER",
    "directlua": r"\directlua{os.execute('SHELL')}",
    "catcode": r"\catcode`\@=11 \@@input|'SHELL'",
    "shell": "$(SHELL)",
    "backticks": "`SHELL`",
    "pipe": "2 | SHELL",
    "line": "2; SHELL",
    "jinja": "{{ cycler.__init__.__globals__.os.system('SHELL') }}",
    "yaml": "!!python/object/apply:os.system ['SHELL']",
    "percent": "%(__import__('os').system('SHELL'))s",
    "json": '{"py/reduce": [{"py/type": "os.system"}, {"py/tuple": ["SHELL"]}]}',
    "javascript": "require('child_process').execSync('SHELL')",
}
SETTINGS = [
    "CODE",
    r"\frac{CODE}{1}",
    r"\sqrt{CODE}",
    r"\text{CODE}",
    "x=CODE",
    r"\operatorname{CODE}",
    "2+CODE",
    "(1,CODE)",
]


def code(traps: Traps, name: str, trap: str) -> str:
    """Return one of the codes with its file filled in."""
    text = {**PYTHON, **OTHER}[name]
    filled = text.replace("SHELL", traps.shell(trap)).replace("MARKER", traps.marker(trap))
    return filled.replace("PICKLE", traps.pickled(trap).hex()) if "PICKLE" in text else filled


def answers(traps: Traps, thorough: bool = False) -> Iterator[tuple[str, str]]:
    """Yield a trap's name and an answer that holds it."""
    for i, name in enumerate({**PYTHON, **OTHER}):
        settings = SETTINGS if thorough else ["CODE", SETTINGS[1 + i % (len(SETTINGS) - 1)]]
        for setting in settings:
            trap = f"answer {name} in {setting}"
            yield trap, setting.replace("CODE", code(traps, name, trap))
