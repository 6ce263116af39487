"""A standard stream that is closed, full, or too narrow for a text ends no run, and no command with a traceback."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from trimtab.process import BROKEN_PIPE

HANG = 120.0  # seconds after which a process is taken for hung
full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


OPEN = "import os, sys; from trimtab import process as s; s.open_standard_streams(); "


@pytest.fixture
def pipe_without_reader() -> Iterator[int]:
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


def python(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run code after the standard streams were opened."""
    command = [sys.executable, "-c", OPEN + code]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(command, text=True, timeout=HANG, check=False, **options)


RESULT = "print('result', file=open('result', 'w'))"


def test_a_run_goes_on_without_a_reader(pipe_without_reader: int, tmp_path: Path) -> None:
    code = "s.make_optional(sys.stdout); [print('x' * 1000) for _ in range(1000)]; print(1, file=sys.stderr); " + RESULT
    done = python(code, stdout=pipe_without_reader, stderr=pipe_without_reader, cwd=tmp_path)
    assert (done.returncode, (tmp_path / "result").read_text()) == (0, "result\n")


@full
def test_a_run_goes_on_when_the_disk_of_its_log_is_full(tmp_path: Path) -> None:
    with open("/dev/full", "w") as disk:
        done = python("s.make_optional(sys.stdout); print(1); " + RESULT, stdout=disk, stderr=disk, cwd=tmp_path)
    assert (done.returncode, (tmp_path / "result").read_text()) == (0, "result\n")


def test_a_log_goes_on_when_its_disk_has_space_again(tmp_path: Path) -> None:
    code = (
        "s.make_optional(sys.stdout); import resource; limit = resource.RLIMIT_FSIZE; "
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); most = resource.getrlimit(limit)[1]; "
        "resource.setrlimit(limit, (4, most)); print('lost'); resource.setrlimit(limit, (most, most)); print('kept')"
    )
    with (tmp_path / "log").open("w") as log:
        assert python(code, stdout=log).returncode == 0
    assert (tmp_path / "log").read_text().endswith("kept\n")


def test_closed_streams_are_the_null_device_and_no_file_takes_their_place(tmp_path: Path) -> None:
    code = OPEN + "file = open('result', 'w'); print('lost'); os.write(1, b'lost'); os.write(2, b'lost'); "
    code += "file.write(f'{file.fileno() > 2} {sys.stdin.read()!r}')"
    subprocess.run(
        ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=HANG
    )
    assert (tmp_path / "result").read_text() == "True ''"


def test_text_that_an_encoding_lacks_is_escaped() -> None:
    done = python(
        r"print('\u2581 \ud800'); print('\xe9', file=sys.stderr)", env={**os.environ, "PYTHONIOENCODING": "ascii"}
    )
    assert (done.stdout, done.stderr) == ("\\u2581 \\ud800\n", "\\xe9\n")


def test_a_full_pipe_that_does_not_block_is_waited_for() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    command = [sys.executable, "-c", OPEN + "[print('x' * 999) for _ in range(1000)]"]
    with subprocess.Popen(command, stdout=write) as process, open(read, "rb") as reader:
        os.close(write)
        assert len(reader.read()) == 1_000_000
    assert process.returncode == 0


# Commands that only print.

LINES = json.dumps({"response": "\\boxed{1}", "answer": "1"}) + "\n"


def trimtab(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "trimtab", *arguments]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(command, text=True, timeout=HANG, check=False, **options)


@pytest.mark.parametrize("command", ["grade", "--help"])
def test_a_command_whose_reader_has_gone_ends_quietly(command: str, pipe_without_reader: int) -> None:
    done = trimtab(command, input=LINES, stdout=pipe_without_reader)
    assert (done.returncode, done.stderr) == (BROKEN_PIPE, "")


def test_a_command_is_stopped_while_its_reader_is_slow() -> None:
    """A thread waits in the middle of a write then, and Python must still be able to end."""
    read, write = os.pipe()
    command = [sys.executable, "-P", "-m", "trimtab", "grade"]
    pipe = subprocess.PIPE
    # Unbuffered: closing a buffered pipe whose reader has gone raises if bytes are left in the buffer.
    with subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=write, stderr=pipe) as process:
        assert process.stdin is not None and process.stderr is not None
        lines = threading.Thread(target=feed, args=(process.stdin,), daemon=True)
        lines.start()
        while select.select([], [write], [], 0)[1]:  # until the pipe is full
            assert process.poll() is None
            time.sleep(0.02)
        process.terminate()
        assert (process.wait(HANG), process.stderr.read()) == (128 + signal.SIGTERM, b"")
    lines.join(HANG)
    os.close(read)
    os.close(write)


def feed(pipe: IO[bytes]) -> None:
    """Write lines until nobody reads them."""
    with contextlib.suppress(OSError):
        while True:
            pipe.write(LINES.encode() * 1000)


@full
def test_verdicts_that_a_disk_has_no_space_for_are_an_error() -> None:
    with open("/dev/full", "w") as disk:
        done = trimtab("grade", input=LINES, stdout=disk)
    assert (done.returncode, done.stderr) == (2, "trimtab: [Errno 28] No space left on device\n")
