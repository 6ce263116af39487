"""Bubblewrap and a server in SandboxFusion's protocol, behind the same interface."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

import trimtab
from trimtab.workers import Sandbox, SandboxError, bubblewrap

PATIENT = 60.0  # seconds, for what ends by itself on a machine of any load


@pytest.fixture(scope="module")
def wrapped() -> Iterator[Sandbox]:
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    try:
        with Sandbox(workers=2, backend="bubblewrap") as made:
            yield made
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("kind", "code", "printed"),
    [
        ("ok", "import numpy, sympy\nprint(numpy.arange(3), sympy.pi)", "[0 1 2] pi\n"),
        ("ok", "import os\nprint(os.getcwd(), os.getpid() < 5, sorted(os.environ)[0])", "/tmp True HOME\n"),
        ("exception", "open('/etc/passwd')", ""),
        ("exception", "open('/file', 'w')", ""),
        ("exception", "import socket\nsocket.socket()", ""),
        ("memory", "x = bytearray(1 << 40)", ""),
        ("output", "print('x' * 100_000)", "x" * 65_536),
        ("killed", "import ctypes\nctypes.string_at(1)", ""),
    ],
)
def test_a_program_in_bubblewrap_meets_the_same_walls(wrapped: Sandbox, kind: str, code: str, printed: str) -> None:
    result = wrapped.run(code, timeout=PATIENT)
    assert (result.kind, result.stdout) == (kind, printed), result


def test_a_deadline_holds_in_bubblewrap(wrapped: Sandbox) -> None:
    assert wrapped.run("while True:\n    pass", timeout=1.0).kind == "timeout"


def test_a_session_lives_in_bubblewrap(wrapped: Sandbox) -> None:
    with wrapped.session(timeout=PATIENT) as session:
        session.run("x = 6")
        assert session.run("print(x * 7)").stdout == "42\n"


def test_the_files_that_bubblewrap_shows_are_enough_for_what_runs_inside(tmp_path: Path) -> None:
    package = Path(trimtab.__file__).parent
    for name in bubblewrap.MODULES:
        copy = shutil.copytree if (package / name).is_dir() else shutil.copy
        (tmp_path / "trimtab").mkdir(exist_ok=True)
        copy(package / name, tmp_path / "trimtab" / name)
    command = [sys.executable, "-P", "-c", "import trimtab.workers.bubblewrap as b; print(b.__file__)"]
    environment = {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.startswith(str(tmp_path)), done.stderr


def test_bubblewrap_that_is_missing_is_said_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.workers.sandbox_client.SEARCH_PATH", "/nonexistent")
    with pytest.raises(SandboxError, match="bubblewrap is not installed: apt-get install bubblewrap"):
        Sandbox(backend="bubblewrap")


@pytest.mark.parametrize("level", ["full", "limits"])
def test_bubblewrap_that_fails_is_refused_and_no_program_is_blamed(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "bwrap"
    command.write_text("#!/bin/sh\necho 'bwrap: Creating new namespace failed' >&2\nexit 1\n")
    command.chmod(0o755)
    monkeypatch.setattr("trimtab.workers.sandbox_client.SEARCH_PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r"work here \(bwrap: Creating new namespace failed\); backend 'fork'"):
        Sandbox(backend="bubblewrap", level=level)


class FusionServer(BaseHTTPRequestHandler):
    """Replies with what the program's text names."""

    replies: ClassVar[dict[str, Any]] = {}
    requests: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append({"path": self.path, **request})
        body = self.replies[request["code"]]
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(500 if request["code"] == "broken" else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def fusion_reply(status: str, code: int | None, stdout: str = "", stderr: str = "") -> dict[str, Any]:
    run = {"status": status, "execution_time": 0.25, "return_code": code, "stdout": stdout, "stderr": stderr}
    return {"status": "Success" if code == 0 else "Failed", "message": "", "run_result": run, "files": {}}


@pytest.fixture
def fusion() -> Iterator[str]:
    FusionServer.requests.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), FusionServer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


RUN: dict[str, Any] = {"status": "Finished", "execution_time": 0.25, "return_code": 0, "stdout": "", "stderr": ""}
HUGE = b'{"run_result": {"status": "Finished", "return_code": %s}}'


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        *(({"run_result": {**RUN, "stdout": value}}, "stdout of its reply is ") for value in (5, True, [], {"a": 1})),
        *(({"run_result": {**RUN, "stderr": value}}, "stderr of its reply is ") for value in (0, False, [["a"]])),
        *(
            ({"run_result": {**RUN, "execution_time": value}}, "execution_time of its reply is ")
            for value in ("1", [], {}, True, 10**400, -(10**400), float("nan"), float("inf"))
        ),
        *(
            ({"run_result": {**RUN, "return_code": value}}, "return_code of its reply is ")
            for value in (None, "0", 0.0, [], {}, True, 10**400, -(10**400))
        ),
        ({"run_result": {}}, "return_code of its reply is None"),
        ({}, "could not run the program: None"),
        ({"run_result": [RUN]}, "could not run the program: None"),
        ({"status": "SandboxError", "run_result": RUN, "message": "\x1b[2J\u202e"}, r"program: '\\x1b\[2J\\u202e'"),
        ({"status": "SandboxError", "message": {"a": ["b"] * 10_000}}, r"\['b', 'b'.*\.\.\.$"),
        (b"5", "the reply is a int, not an object"),
        (b"null", "the reply is a NoneType, not an object"),
        (b"{not json", "the reply is no JSON"),
        (b"\xff\xfe\x00", "the reply is no JSON"),
        (b"[" * 1_000_000, "the reply is no JSON"),
        (HUGE % (b"9" * 10_000), "the reply is no JSON"),
        (b" " * (17 << 20), "a response of more than 16,777,216 bytes"),
    ],
)
def test_a_reply_of_any_other_kind_is_an_error_in_words(fusion: str, reply: object, words: str) -> None:
    FusionServer.replies = {"program": reply}
    with Sandbox(backend="http", url=fusion, workers=1) as remote, pytest.raises(SandboxError, match=words) as error:
        remote.run("program", timeout=PATIENT)
    assert len(str(error.value)) < 1_000 and str(error.value).isprintable()


def test_a_url_with_a_password_is_refused_unseen() -> None:
    with pytest.raises(SandboxError, match="contains a password") as error:
        Sandbox(backend="http", url="http://user:sesame@localhost:8080")
    assert "sesame" not in str(error.value)


def test_a_server_in_sandboxfusions_protocol_runs_programs(fusion: str) -> None:
    FusionServer.replies = {
        "good": fusion_reply("Finished", 0, "42\n"),
        "bad": fusion_reply("Finished", 1, "", "Traceback\nZeroDivisionError: division by zero\n"),
        "slow": fusion_reply("TimeLimitExceeded", None),
        "big": fusion_reply("Finished", 1, "", "Traceback\nMemoryError\n"),
        "dead": fusion_reply("Finished", -11),
        "long": fusion_reply("Finished", 0, "x" * 100),
    }
    with Sandbox(backend="http", url=fusion, workers=2, output_bytes=50) as remote:
        results = {name: remote.run(name, timeout=3.0) for name in FusionServer.replies}
        with pytest.raises(SandboxError, match="has no sessions"):
            remote.session()
    kinds = {name: result.kind for name, result in results.items()}
    assert kinds == {
        "good": "ok", "bad": "exception", "slow": "timeout", "big": "memory", "dead": "killed", "long": "output",
    }  # fmt: skip
    assert (results["good"].stdout, results["good"].ms) == ("42\n", 250.0)
    assert results["bad"].error.endswith("ZeroDivisionError: division by zero\n")
    assert results["long"].stdout == "x" * 50
    sent = FusionServer.requests[0]
    assert (sent["path"], sent["language"], sent["run_timeout"]) == ("/run_code", "python", 3.0)


@pytest.mark.parametrize(
    ("code", "reply", "words"),
    [
        ("broken", b"oops", "status 500"),
        ("odd", b"oops", "the reply is no JSON"),
        ("list", [1], "the reply is a list, not an object"),
        ("full", {"status": "SandboxError", "message": "no room", "run_result": None}, "no room"),
    ],
)
def test_a_server_that_fails_is_not_taken_for_a_program_that_does(
    fusion: str, code: str, reply: Any, words: str
) -> None:
    FusionServer.replies = {code: reply}
    with Sandbox(backend="http", url=fusion, workers=1) as remote, pytest.raises(SandboxError, match=words):
        remote.run(code, timeout=PATIENT)


def test_a_server_needs_an_address() -> None:
    with pytest.raises(SandboxError, match="backend 'http' needs the address of a server"):
        Sandbox(backend="http")
