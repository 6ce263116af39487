"""Signals and kills during `report`, `replay`, `alarms` and `grade`.

They end at once with the exit code of the signal, leave no process, and leave each file as it was or whole; the same
command again gives what it gives undisturbed.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import select
import shutil
import signal
import struct
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.hostile.disturbed_runs import check_end, disturb_grading, each, prepare, some
from helpers.hostile.started_commands import Starter, pipe, unread_pipe
from trimtab.insight.report.page import TITLE_END

AT_ONCE = {"SIGHUP": 129, "SIGINT": 130, "SIGTERM": 143}
ENDS = {**AT_ONCE, "SIGKILL": -9}
READER_GONE = 141
LINES = [("It is \\boxed{4}.", "4"), ("\\boxed{\\frac{1}{2}}", "0.5"), ("\\boxed{5}", "4"), ("nothing", "4")]


# report and replay, which write a file


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of a finished run, without its report."""
    shutil.copytree(finished / "run", tmp_path / "run")
    (tmp_path / "run" / "report.html").unlink()
    return tmp_path / "run"


def is_page(text: str) -> bool:
    return text.rstrip().endswith("</html>")


WRITERS: dict[str, tuple[list[str], str, Callable[[str], bool]]] = {
    "report": (["report", "run", "--out", "made"], "made", is_page),
    "report of two": (["report", "run", "run2", "--out", "made"], "made", is_page),
    "report in place": (["report", "run"], "run/report.html", is_page),
    "replay": (["replay", "run", "--objective", "gspo", "--json", "made"], "made", lambda text: bool(json.loads(text))),
}
OLD = f"what was there before{TITLE_END.decode()}"  # of a report, or it is not overwritten


OVER = [(what, name, before) for what in WRITERS for name in ENDS for before in (True, False)]


@pytest.mark.parametrize(
    ("what", "name", "before"),
    some(
        [(f"{a} {b} {'over another' if c else 'alone'}", (a, b, c)) for a, b, c in OVER],
        {"report SIGTERM over another"},
    ),
)
def test_a_file_being_written_stays_as_it_was(
    what: str, name: str, before: bool, starter: Starter, tmp_path: Path, run: Path
) -> None:
    words, made, is_whole = WRITERS[what]
    shutil.copytree(run, tmp_path / "run2")
    if before:
        (tmp_path / made).write_text(OLD)
    there = sorted(tmp_path.rglob("*"))
    command = starter.start(words, tmp_path, at="file.written:1", signals=[name])
    check_end(command, {ENDS[name]})
    assert command.reached
    if name == "SIGKILL":
        assert (tmp_path / made).exists() == before
    else:
        assert sorted(tmp_path.rglob("*")) == there, "something half-written is left"
    assert not before or (tmp_path / made).read_text() == OLD
    check_end(starter.start(words, tmp_path), {0})
    assert is_whole((tmp_path / made).read_text())


@pytest.mark.parametrize(
    ("what", "number", "name"),
    some([(f"{a} {n} {b}", (a, n, b)) for a in ("report", "replay") for n in range(2) for b in ENDS], set()),
)
def test_a_writer_signalled_at_any_moment_leaves_the_old_file_or_the_new_one(
    what: str, number: int, name: str, starter: Starter, tmp_path: Path, run: Path
) -> None:
    words, made, is_whole = WRITERS[what]
    (tmp_path / made).write_text(OLD)
    command = starter.start(words, tmp_path)
    assert command.pid
    select.select([], [], [], random.Random(number).uniform(0, 0.5))
    command.signal(name)
    # A signal may come before the command has begun to take signals.
    check_end(command, {0, ENDS[name], -signal.Signals[name]})
    text = (tmp_path / made).read_text()
    assert text == OLD or is_whole(text)


@pytest.mark.parametrize("name", some(each(AT_ONCE), {"SIGTERM"}))
def test_a_signal_whose_interrupt_python_drops_ends_a_command(
    name: str, starter: Starter, tmp_path: Path, run: Path
) -> None:
    command = starter.start(["report", "run"], tmp_path, at="file.written:1", signals=["destructor", name, 20.0])
    check_end(command, {AT_ONCE[name]})
    assert not (run / "report.html").exists()


@pytest.mark.parametrize("name", some(each(["SIGHUP", "SIGINT"]), set()))
@pytest.mark.parametrize("what", ["report", "replay"])
def test_other_commands_leave_an_ignored_signal_ignored(
    what: str, name: str, starter: Starter, tmp_path: Path, run: Path
) -> None:
    words, made, is_whole = WRITERS[what]
    command = starter.start(words, tmp_path, at="file.written:1", signals=[name], ignored=[name])
    check_end(command, {0})
    assert command.reached and is_whole((tmp_path / made).read_text())


# grade and alarms, which read and print


def unread(descriptor: int) -> int:
    """Return how many bytes of a pipe nobody has read yet."""
    return int(struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4))[0])


@pytest.mark.parametrize("name", some(each([*ENDS, "SIGINT SIGINT", "SIGTERM SIGTERM", "group SIGINT"]), set()))
def test_grading_from_a_slow_pipe_ends_at_once(name: str, starter: Starter, tmp_path: Path) -> None:
    path = pipe(tmp_path)
    command = starter.start(["grade"], tmp_path, stdin=path)
    writer = os.open(path, os.O_WRONLY)
    try:
        lines = [json.dumps({"response": response, "answer": answer}) for response, answer in LINES]
        os.write(writer, "".join(line + "\n" for line in lines).encode())
        command.wait_until(lambda: not unread(writer))
        names = [each for each in name.split() if each != "group"]
        command.signal(*names, group="group" in name)
        check_end(command, {ENDS[names[0]]})
    finally:
        os.close(writer)


@pytest.mark.parametrize("how", some(each([*ENDS, "group SIGINT", "worker", "workers"]), {"workers"}))
def test_signals_while_lines_are_graded(how: str, starter: Starter, tmp_path: Path) -> None:
    prepare(tmp_path)
    (tmp_path / "hold").touch()
    texts = ["a" * n for n in range(8)]
    (tmp_path / "lines").write_text("".join(json.dumps({"response": text, "answer": "x"}) + "\n" for text in texts))
    words = ["grade", "--rule", "python:rules:even"]
    streams = {"stdin": str(tmp_path / "lines"), "stdout": str(tmp_path / "verdicts")}
    command = starter.start(words, tmp_path, **streams)
    disturb_grading(command, how, tmp_path)
    if not how.startswith("worker"):
        check_end(command, {ENDS[how.rsplit(maxsplit=1)[-1]]})
        return
    check_end(command, {0, 2})
    verdicts = [json.loads(line) for line in (tmp_path / "verdicts").read_text().splitlines()]
    assert len(verdicts) == len(texts)
    for text, verdict in zip(texts, verdicts, strict=True):
        assert verdict["kind"] in {"correct" if len(text) % 2 == 0 else "wrong", "crashed"}


PRINTERS = {
    "grade": ["grade"],
    "alarms": ["alarms", "run"],
    "alarms --json": ["alarms", "run", "--json"],
    "replay": ["replay", "run", "--objective", "gspo"],
    "report": ["report", "run"],
    "methods": ["methods"],
    "schema": ["schema"],
    "dry run": ["train", "--dry-run"],
}


OUTPUTS = [(what, output) for what in PRINTERS for output in ("reader gone", "full", "closed")]


@pytest.mark.parametrize(
    ("what", "output"), some([(f"{a}, {b}", (a, b)) for a, b in OUTPUTS], {"alarms, reader gone", "grade, full"})
)
def test_commands_that_print_end_without_their_output(
    what: str, output: str, starter: Starter, tmp_path: Path, run: Path
) -> None:
    (tmp_path / "lines").write_text(json.dumps({"response": "\\boxed{4}", "answer": "4"}) + "\n")
    how = {"stdin": str(tmp_path / "lines")}
    if output == "reader gone":
        with unread_pipe(tmp_path) as path:
            command = starter.start(PRINTERS[what], tmp_path, **how, stdout=path, begin=str(tmp_path / "begin"))
            command.wait_for_file("opened")
        (tmp_path / "begin").touch()
        silent = what == "alarms --json"  # no alarm rang: nothing is printed
        check_end(command, {0} if silent else {READER_GONE, 0} if what == "report" else {READER_GONE})
        assert "trimtab:" not in command.output
    elif output == "full":
        command = starter.start(PRINTERS[what], tmp_path, **how, stdout="/dev/full")
        check_end(command, {0} if what == "alarms --json" else {1, 2})
        assert what == "alarms --json" or "No space left" in command.output
    else:
        command = starter.start(PRINTERS[what], tmp_path, **how, stdout="closed")
        check_end(command, {0, 1, 2, READER_GONE})


@pytest.mark.parametrize(
    ("number", "name"), some([(f"{n} {name}", (n, name)) for n in range(3) for name in ENDS], set())
)
def test_alarms_and_grading_signalled_at_any_moment_end_quietly(
    number: int, name: str, starter: Starter, tmp_path: Path, run: Path
) -> None:
    (tmp_path / "lines").write_text(json.dumps({"response": "\\boxed{4}", "answer": "4"}) + "\n")
    for words in (["alarms", "run"], ["grade"]):
        command = starter.start(words, tmp_path, stdin=str(tmp_path / "lines"))
        assert command.pid
        select.select([], [], [], random.Random(number).uniform(0, 0.2))
        command.signal(name)
        check_end(command, {0, ENDS[name], -signal.Signals[name]})
