"""Attempts to escape from the sandbox: small programs in `tests/workers/escapes`, one file per kind.

An attempt starts with `# %% its name`, then lines `# key: value`:
`proof`: where it is shown to win: plain (any bare process), root, ptrace (where the machine lets processes trace each
other), shared (an interpreter that programs share), machine (depends on the kernel, not asserted), or no, and why;
`timeout`: its deadline in seconds; `in: session`: each of its programs runs in a session of its own, `in: one session`:
all in the same one; `beside: an ordinary run`: one runs at the same time and must work; `wins when kind`: the result
that would be a lie.
`# --- then` starts a further program, which runs after the first one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[3] / "workers" / "escapes"
PRELUDE = FOLDER / "prelude.py"
KEYS = {"proof", "timeout", "in", "beside", "wins when kind"}


@dataclass(frozen=True)
class Attempt:
    """One attempt: programs that run one after the other."""

    kind: str
    name: str
    programs: tuple[str, ...]
    proof: str
    timeout: float = 5.0
    in_session: bool = False
    turns: bool = False  # all of its programs in the same session
    beside: bool = False
    lie: str = ""  # the kind of result that it must not get
    alone: bool = False  # without the prelude

    def program(self, number: int, world: dict[str, Any], fresh_secret: str) -> str:
        """Return a program as it is run: behind the prelude that tells it about the world outside."""
        if self.alone:
            return self.programs[number]
        prelude = f"WORLD = {world!r}\n{PRELUDE.read_text()}"
        return prelude + "\n\n" + self.programs[number].replace("FRESH_SECRET", fresh_secret)


def all_attempts() -> list[Attempt]:
    """Read every attempt, kind by kind."""
    found = [attempt for path in sorted(FOLDER.glob("*.py")) if path != PRELUDE for attempt in read_attempts(path)]
    return found + [
        Attempt("texts", name, (text,), "no, it only tries to confuse the runner", 2.0, alone=True)
        for name, text in TEXTS.items()
    ]


def read_attempts(path: Path) -> list[Attempt]:
    """Read the attempts of one kind."""
    return [_read_attempt(path.stem, text) for text in path.read_text().split("# %% ")[1:]]


def _read_attempt(kind: str, text: str) -> Attempt:
    name, *lines = text.splitlines()
    options = {}
    while lines and lines[0].startswith("# ") and lines[0][2:].partition(": ")[0] in KEYS:
        key, _, value = lines.pop(0)[2:].partition(": ")
        options[key] = value
    assert "proof" in options, f"{kind}, {name}: says nothing about its proof"
    return Attempt(
        kind,
        name,
        tuple("\n".join(lines).split("# --- then\n")),
        options["proof"],
        float(options.get("timeout", 5)),
        "in" in options,
        options.get("in") == "one session",
        "beside" in options,
        options.get("wins when kind", ""),
    )


# Programs whose text alone may hurt who reads, compiles or shows them; they run without the prelude.
TEXTS = {
    "empty": "",
    "a zero": "print(1)\0",
    "half a surrogate": "x = '\ud800'; raise ValueError(x)",
    "a byte order mark": "\ufeffprint(1)",
    "an unknown encoding": "# coding: no-such-encoding\nprint(1)",
    "another encoding": "# coding: utf-7\n+AHAAcgBpAG4AdA-(1)",
    "other ends of lines": "print(1)\r\x0cprint(2)\u2028print(3)",
    "many brackets": "(" * 200_000,
    "many operators": "x = " + "-" * 200_000 + "1",
    "many lines": "\n" * 2_000_000,
    "one long line": "x = '" + "a" * 8_000_000 + "'",
    "many digits": "print(" + "9" * 1_000_000 + ")",
    "deep blocks": "".join(" " * depth + "if 1:\n" for depth in range(300)),
    "many attributes": "x" + ".x" * 100_000,
    "nested texts": "f'{" * 200 + "1" + "}'" * 200,
    "lines like the end of a message": 'print("ok")\n{"kind": "ok", "stdout": ""}\n--\n\x04\x1a\nEOF\n',
    "a future": "from __future__ import braces",
    "nothing but a comment": "#",
    "await outside": "await x",
    "return outside": "return 1",
}


# An ordinary program that prints what an earlier one could have changed for it.
ORDINARY = """
import builtins, decimal, fractions, itertools, json, locale, math, os, random, resource, signal, sys, threading
import numpy, sympy
x = sympy.symbols("x")
print(x + x, sympy.Integer(1) + 1, numpy.linalg.det(2 * numpy.eye(3)), fractions.Fraction(1, 3) + 1, math.pi, math.tau)
print(sum(range(10)), sorted(vars(builtins)), len(sys.meta_path), sys.path, sys.gettrace(), sys.getprofile())
print(sys.getrecursionlimit(), sys.getswitchinterval(), decimal.getcontext(), sorted(os.environ), os.umask(0o22))
print([str(signal.getsignal(number)) for number in range(1, 32)], signal.pthread_sigmask(signal.SIG_BLOCK, ()))
print([resource.getrlimit(number) for number in range(10)], os.getpriority(os.PRIO_PROCESS, 0))
print(sorted(os.listdir(".")), sorted(os.listdir("/tmp")) if os.path.isdir("/tmp") else "", threading.active_count())
print(sorted(name for name in sys.modules if "." not in name))
"""
