"""Programs that a maths model writes work, and tell what went wrong as Python does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from trimtab.workers import Result, Sandbox

PATIENT = 60.0  # seconds, for what ends by itself on a machine of any load


def output(sandbox: Sandbox, code: str) -> str:
    result = sandbox.run(code, timeout=PATIENT)
    assert result.kind == "ok", result
    return result.stdout


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("print(1 + 1)", "2\n"),
        ("import numpy as np\nprint(np.arange(6).reshape(2, 3).sum(axis=0))", "[3 5 7]\n"),
        ("import numpy as np\nprint(np.linalg.solve([[2, 0], [0, 4]], [1, 1]))", "[0.5  0.25]\n"),
        ("import numpy as np\nprint(np.roots([1, -3, 2]))", "[2. 1.]\n"),
        ("from sympy import *\nx = symbols('x')\nprint(solve(x**2 - 2, x))", "[-sqrt(2), sqrt(2)]\n"),
        ("import sympy\nprint(sympy.factorint(2**64 + 1))", "{274177: 1, 67280421310721: 1}\n"),
        ("import sympy as sp\nt = sp.Symbol('t')\nprint(sp.integrate(sp.sin(t)**2, (t, 0, sp.pi)))", "pi/2\n"),
        ("from fractions import Fraction\nprint(sum(Fraction(1, n) for n in range(1, 7)))", "49/20\n"),
        ("from itertools import permutations\nprint(sum(p[0] < p[1] for p in permutations(range(5))))", "60\n"),
        ("from decimal import Decimal, getcontext\ngetcontext().prec = 30\nprint(Decimal(2).sqrt())", None),
        ("import mpmath\nmpmath.mp.dps = 30\nprint(mpmath.zeta(3))", "1.20205690315959428539973816151\n"),
        ("import math\nprint(math.factorial(30) // math.comb(60, 30))", "2242876576422120\n"),
        ("import sqlite3\nprint(sqlite3.connect(':memory:').execute('select 6 * 7').fetchone())", "(42,)\n"),
        ("import sqlite3\nc = sqlite3.connect('file:a?vfs=unix-none', uri=True)\nc.execute('create table t (x)')", ""),
        ("import random\nrandom.seed(0)\nprint(random.randint(1, 100))", "50\n"),
        ("print(sorted({'b', 'a', 'c'}))\nprint({'b', 'a', 'c'})", None),
        ("def main():\n    print('called')\nif __name__ == '__main__':\n    main()", "called\n"),
        ("import sys\nsys.setrecursionlimit(5000)\nf = lambda n: n and 1 + f(n - 1)\nprint(f(4000))", "4000\n"),
        ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\nprint(P(3))", "P(x=3)\n"),
        ("open('notes.txt', 'w').write('kept for now')\nprint(open('notes.txt').read())", "kept for now\n"),
        ("import tempfile\nprint(tempfile.TemporaryFile().name is not None)", "True\n"),
        ("import asyncio\nprint(asyncio.run(asyncio.sleep(0, 'done')))", "done\n"),
        ("from concurrent.futures import ThreadPoolExecutor as T\nprint(sum(T(4).map(abs, [-1, 2])))", "3\n"),
        ("import sys\nsys.exit()", ""),
        ("", ""),
    ],
)
def test_a_program_prints_what_python_prints(sandbox: Sandbox, code: str, printed: str | None) -> None:
    if printed is None:  # in the words of this interpreter
        printed = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "0"}
        ).stdout
    assert output(sandbox, code) == printed


def test_integers_may_be_long(sandbox: Sandbox) -> None:
    assert len(output(sandbox, "print(2**100_000)")) == 30_104


def test_processes_work_within_limits(sandbox: Sandbox) -> None:
    code = "from multiprocessing import Pool\nwith Pool(2) as pool:\n    print(pool.map(abs, [-1, -2, 3]))"
    assert output(sandbox, code) == "[1, 2, 3]\n"
    code = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(6 * 7)'], check=True)"
    assert output(sandbox, code) == "42\n"


@pytest.mark.parametrize(
    "code",
    [
        "def f(x):\n    return 1 / x\n\nprint('before')\nf(0)\n",
        "x = [1, 2\nprint(x)\n",
        "raise ValueError('a text\\nof two lines')",
        "try:\n    {}['k']\nexcept KeyError as error:\n    raise RuntimeError('no key') from error",
        "import fractions\nfractions.Fraction('a/b')",
        "class Odd(Exception):\n    pass\nraise Odd",
        "import sys\nsys.exit('the reason')",
        "def deep():\n    deep()\ndeep()",
        "print(undefined_name)",
        "assert 1 == 2, 'sums differ'",
    ],
)
def test_a_traceback_is_the_one_that_python_prints(sandbox: Sandbox, code: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(code)
    plain = subprocess.run(
        [sys.executable, "-I", "program.py"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    result = sandbox.run(code, timeout=PATIENT)
    # Python 3.11 names the script by its full path.
    expected = plain.stderr.replace(f'"{tmp_path}/program.py"', '"program.py"')
    # Calls from C count differently between versions of Python, by a handful.
    found, expected = (re.sub(r"repeated 9\d\d more", "repeated 9xx more", text) for text in (result.error, expected))
    assert (result.kind, result.stdout, found) == ("exception", plain.stdout, expected)


@pytest.mark.parametrize("code", ["import matplotlib.pyplot as plt", "from PIL import Image", "import turtle"])
def test_plotting_is_refused_politely(sandbox: Sandbox, code: str) -> None:
    result = sandbox.run(code, timeout=PATIENT)
    assert result.kind == "exception"
    assert result.error.endswith("nothing can be shown here, print numbers instead of plotting them\n")


def test_a_package_that_is_not_offered_is_not_there(sandbox: Sandbox) -> None:
    for name in ("torch", "trimtab", "pytest"):
        assert f"ModuleNotFoundError: No module named '{name}'" in sandbox.run(f"import {name}", timeout=PATIENT).error


def test_warnings_are_kept_beside_the_output(sandbox: Sandbox) -> None:
    result = sandbox.run("import numpy as np\nprint(np.array([1.0]) / 0)", timeout=PATIENT)
    assert (result.kind, result.stdout) == ("ok", "[inf]\n")
    assert "RuntimeWarning: divide by zero" in result.error


def test_random_numbers_differ_from_run_to_run(sandbox: Sandbox) -> None:
    code = "import numpy as np, random\nprint(np.random.rand(), random.random(), np.random.default_rng().random())"
    numbers = [output(sandbox, code).split() for _ in range(3)]
    assert all(len(set(column)) == 3 for column in zip(*numbers, strict=True))


def test_a_run_says_how_long_it_took(sandbox: Sandbox) -> None:
    result: Result = sandbox.run("import time\ntime.sleep(0.05)", timeout=PATIENT)
    assert 50 <= result.ms < 1e3 * PATIENT
