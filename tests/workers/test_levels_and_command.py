"""Levels: what a machine offers is said and used, less than what was asked for is refused; and `trimtab sandbox`."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from trimtab.workers import LEVELS, Probe, Result, Sandbox, SandboxError, run_input
from trimtab.workers.sandbox_client import SandboxClient

PATIENT = 60.0  # seconds, for what ends by itself on a machine of any load


def probe_without(*layers: str) -> Probe:
    reasons = {
        name: "it is not there" if name in layers else "" for name in ("namespaces", "landlock", "seccomp", "uid")
    }
    return Probe(reasons, landlock=4)


@pytest.mark.parametrize(
    ("missing", "level"),
    [
        ((), "full"),
        (("landlock",), "namespaces"),
        (("namespaces",), "filters"),
        (("seccomp",), "limits"),
        (("namespaces", "landlock"), "limits"),
    ],
)
def test_the_level_is_the_strongest_whose_layers_hold(missing: tuple[str, ...], level: str) -> None:
    probe = probe_without(*missing)
    assert probe.level == level
    assert probe.line().startswith(f"level {level} (")
    assert "\n" not in probe.line()
    names = list(LEVELS)
    for weaker in names[names.index(level) :]:
        probe.require(weaker)
    for stronger in names[: names.index(level)]:
        with pytest.raises(SandboxError, match=f"level '{level}'.*not '{stronger}'.*ask for level='{level}'"):
            probe.require(stronger)


def test_a_refusal_says_what_is_missing_and_how_to_get_it() -> None:
    with pytest.raises(SandboxError, match=r"namespaces: it is not there; (start the container|allow user namespaces)"):
        probe_without("namespaces").require("full")
    with pytest.raises(SandboxError, match=r"landlock: it is not there; it needs Linux 5\.13"):
        probe_without("landlock").require("full")


class Lacking(Sandbox):
    """A sandbox as on a machine that lacks layers."""

    lacks: tuple[str, ...] = ("namespaces",)

    def _start(self) -> SandboxClient:
        return SandboxClient(self.limits, self.packages, without=self.lacks)


class LackingMost(Lacking):
    lacks = ("namespaces", "seccomp")


def test_a_machine_without_a_layer_is_refused_unless_asked_for() -> None:
    with pytest.raises(SandboxError, match="offers level 'limits'"):
        LackingMost(workers=1)
    with LackingMost(workers=1, level="limits") as bare:
        assert bare.run("print(1)", timeout=PATIENT).stdout == "1\n"


@pytest.fixture(scope="module")
def filters() -> Iterator[Sandbox]:
    try:
        with Lacking(workers=2, level="filters") as made:
            yield made
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("open('/etc/passwd')", "PermissionError"),
        ("open('/tmp/new-by-a-program', 'w')", "PermissionError"),
        ("import os\nos.listdir('/')", "PermissionError"),
        ("import os\nos.fork()", "PermissionError"),
        ("import os\nos.kill(os.getppid(), 9)", "PermissionError"),
        ("import os\nos.kill(os.getppid(), 0)", "PermissionError"),
        ("import socket\nsocket.socket()", "PermissionError"),
        ("import resource, os\nresource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (1, 1))", "PermissionError"),
        ("import subprocess\nsubprocess.run(['/bin/true'])", "PermissionError"),
    ],
)
def test_filters_alone_leave_nothing_to_touch(filters: Sandbox, code: str, error: str) -> None:
    result = filters.run(code, timeout=PATIENT)
    assert result.kind == "exception"
    assert error in result.error


def test_programs_work_behind_filters_alone(filters: Sandbox) -> None:
    code = "import numpy as np, sympy, json\nprint(np.ones(2) @ np.ones(2), sympy.sqrt(8), json.dumps([1]))"
    assert filters.run(code, timeout=PATIENT).stdout == "2.0 2*sqrt(2) [1]\n"
    assert (
        filters.run("import threading\nthreading.Thread(target=print, args='a').start()", timeout=PATIENT).stdout
        == "a\n"
    )
    assert filters.run("while True:\n    pass", timeout=1.0).kind == "timeout"
    with filters.session(timeout=PATIENT) as session:
        session.run("x = 5")
        assert session.run("print(x)").stdout == "5\n"


def run_command(program: bytes, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "trimtab", "sandbox", "--level", "limits", *arguments]
    return subprocess.run(command, input=program, capture_output=True, check=False)


def test_the_command_prints_the_result_as_its_last_line() -> None:
    done = run_command(b"print(6 * 7)", "--json")
    assert done.returncode == 0
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result) == {field.name for field in fields(Result)}
    assert (result["stdout"], result["error"], result["kind"]) == ("42\n", "", "ok")


def test_the_probe_says_what_holds_in_a_line() -> None:
    done = run_command(b"", "--probe")
    assert done.returncode == 0
    assert done.stdout.startswith(b"level ")


@pytest.mark.parametrize(
    ("program", "timeout", "code", "out", "error"),
    [
        (b"print('a\\tb')", PATIENT, 0, "a\tb\n", ""),
        (b"print(1)\n1 / 0", PATIENT, 1, "1\n", "ZeroDivisionError: division by zero\n"),
        (b"while True: pass", 1.0, 3, "", "killed: it took longer than 1 s\n"),
        (b"x = bytearray(1 << 40)", PATIENT, 3, "", "MemoryError\n"),
        (b"print('\\x1b]0;title\\x07')", PATIENT, 0, "\\x1b]0;title\\x07\n", ""),
        (b"#" * (1 << 21), PATIENT, 2, "", "more than 1,048,576\n"),
    ],
)
def test_exit_codes_tell_an_exception_from_a_kill(
    program: bytes, timeout: float, code: int, out: str, error: str
) -> None:
    shown, errors = io.StringIO(), io.StringIO()
    assert run_input(io.BytesIO(program), shown, errors, timeout, as_json=False, workers=1, level="limits") == code
    assert shown.getvalue() == out
    assert errors.getvalue().endswith(error)


def test_a_program_that_is_not_utf8_is_an_error_in_words() -> None:
    done = run_command(b"print('\xff')")
    assert done.returncode == 2
    assert done.stderr.startswith(b"trimtab: the program is not UTF-8")


def test_root_drops_its_uid(sandbox: Sandbox) -> None:
    """Seen from outside: the process of a session belongs to nobody."""
    if os.geteuid() != 0:
        pytest.skip("not root")
    server = sandbox.server()
    assert isinstance(server, SandboxClient)
    with sandbox.session(timeout=PATIENT) as session:
        assert session.run("import os\nprint(os.getuid())").stdout == "1000\n"
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        assert [os.stat(f"/proc/{pid}").st_uid for pid in children] == [65534]


WITHOUT_CAPABILITIES = """
import os, sys, time
from trimtab.workers import Sandbox, SandboxError
from trimtab.workers.linux import prctl

prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what is left behind becomes a child of this process
try:
    Sandbox(workers=1)
except SandboxError as error:
    print(error)
with Sandbox(workers=1, level="limits") as sandbox:
    print(sandbox.probe.line(), *sandbox.probe.missing(), sep="\\n")
    print(sandbox.run("import os\\nprint(os.getuid(), 6 * 7)", timeout=60.0))
end = time.monotonic() + 60.0
try:
    while time.monotonic() < end:
        os.waitpid(-1, os.WNOHANG) == (0, 0) and time.sleep(0.01)
    print("a process was left behind")
except ChildProcessError:
    pass
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="only root has capabilities")
@pytest.mark.parametrize("lost", ["setuid", "setgid", "all"])
def test_root_that_cannot_become_nobody_says_so_and_works_at_the_levels_that_hold(lost: str) -> None:
    command = ["setpriv", f"--bounding-set=-{lost}", sys.executable, "-c", WITHOUT_CAPABILITIES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    refusal, line, *rest = done.stdout.splitlines()
    assert "not 'full'. Missing: namespaces: root cannot become nobody (Operation not permitted); run it as" in refusal
    assert line.startswith("level filters (") and "no namespaces" in line and line.endswith(", rlimits, root")
    assert [text.partition(";")[0] for text in rest[:-1]] == [
        f"{layer}: root cannot become nobody (Operation not permitted)" for layer in ("namespaces", "uid")
    ]
    assert "stdout='0 42\\n'" in rest[-1] and "kind='ok'" in rest[-1]
