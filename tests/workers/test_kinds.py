"""How a run ends is told apart, and none of its ends harms the next run."""

from __future__ import annotations

import pytest

from trimtab.workers import Kind, Result, Sandbox, SandboxError

PATIENT = 60.0  # seconds, for what ends by itself on a machine of any load
# No process takes more than it may, all together do.
HOARD = "x = bytearray(os.urandom(1 << 20)) * 200\nimport time\ntime.sleep(600)"


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        ("ok", "print('fine')", ""),
        ("exception", "1 / 0", "ZeroDivisionError: division by zero"),
        ("exception", "import os\nos._exit(7)", "the program ended with exit code 7"),
        ("exception", "input()", "EOFError: EOF when reading a line"),
        ("memory", "x = bytearray(1 << 40)", "MemoryError"),
        ("memory", "import numpy as np\nnp.ones((1 << 20, 1 << 14))", "Unable to allocate"),
        ("memory", "x = []\nwhile True:\n    x.append(bytearray(1 << 24))", "MemoryError"),
        (
            "memory",
            f"import os\nos.fork(), os.fork(), os.fork()\n{HOARD}",
            "its processes took too much memory together",
        ),
        ("output", "while True:\n    print('x' * 1000)", "killed: it printed more than 65,536 bytes"),
        ("output", "import sys\nwhile True:\n    sys.stderr.write('x' * 1000)", "more than 65,536 bytes"),
        ("killed", "import ctypes\nctypes.string_at(1)", "killed by SIGSEGV"),
    ],
)
def test_each_end_has_its_kind_and_the_next_run_works(sandbox: Sandbox, kind: Kind, code: str, words: str) -> None:
    result = sandbox.run(code, timeout=PATIENT)
    assert result.kind == kind, result
    assert words in result.error
    assert sandbox.run("print('next')", timeout=PATIENT).stdout == "next\n"


@pytest.mark.parametrize(
    "code",
    [
        "print('begun')\nwhile True:\n    pass",
        "print('begun')\nimport time\ntime.sleep(600)",
        "print('begun')\n(10**7)**(10**7)",  # never comes back to the interpreter
        "print('begun')\nimport threading\nthreading.Thread(target=threading.Event().wait).start()",
        "print('begun')\nimport signal\nsignal.pthread_sigmask(0, signal.valid_signals())\nwhile True:\n    pass",
    ],
)
def test_a_deadline_ends_a_run_and_keeps_what_it_printed(sandbox: Sandbox, code: str) -> None:
    result = sandbox.run(code, timeout=2.0)
    assert (result.kind, result.stdout) == ("timeout", "begun\n")
    assert result.error == "killed: it took longer than 2 s"
    assert result.ms >= 2000


def test_output_is_cut_at_its_limit() -> None:
    with Sandbox(workers=1, level="limits", output_bytes=100) as small:
        result = small.run("print('é' * 100)", timeout=PATIENT)
    assert result.kind == "output"
    assert result.stdout == "é" * 50


def test_invalid_bytes_are_replaced(sandbox: Sandbox) -> None:
    result = sandbox.run("import os\nos.write(1, b'a\\xff\\x00b')", timeout=PATIENT)
    assert result.stdout == "a\ufffd\x00b"


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), "5"])
def test_a_timeout_that_is_none_is_refused(sandbox: Sandbox, timeout: float) -> None:
    result = sandbox.run("print(1)", timeout=timeout)
    assert (result.kind, result.error) == (
        "refused",
        f"timeout is {timeout!r}; it must be a number of seconds above 0",
    )


def test_a_program_that_is_too_long_is_refused(sandbox: Sandbox) -> None:
    result = sandbox.run("#" * (1 << 20) + "\n", timeout=PATIENT)
    assert result == Result("", "the program has 1,048,577 bytes, more than 1,048,576", "refused", 0.0)
    assert sandbox.run("x = '" + "a" * 1_000_000 + "'\nprint(len(x))", timeout=PATIENT).stdout == "1000000\n"


def test_text_that_is_no_program_is_an_exception(sandbox: Sandbox) -> None:
    for code in ("\x00", "\ud800", "print('\ud800')", "\x1b[31m", "x = (((("):
        assert sandbox.run(code, timeout=PATIENT).kind == "exception", repr(code)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": -1}, "workers is -1"),
        ({"memory_mb": 0}, "memory_mb is 0"),
        ({"output_bytes": 1.5}, "output_bytes is 1.5"),
        ({"level": "highest"}, "level is 'highest'; it must be one of full, namespaces, filters, limits"),
        ({"backend": "docker"}, "backend is 'docker'; it must be one of fork, bubblewrap, http"),
        ({"packages": ("no_such_package",)}, "No module named 'no_such_package'"),
    ],
)
def test_a_bad_option_is_named(options: dict[str, object], words: str) -> None:
    with pytest.raises(SandboxError, match=words):
        Sandbox(**options)  # type: ignore[arg-type]
