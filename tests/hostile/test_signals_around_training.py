"""Signals in a row, to a group, at the start, through a terminal, closed streams and killed workers during `train`."""

from __future__ import annotations

import os
import random
import select
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from helpers.hostile.disturbed_runs import (
    OWN_RULE,
    check_end,
    checkpoints,
    contents,
    differences,
    disturb_grading,
    finish,
    prepare,
    some,
    steps,
    train_words,
)
from helpers.hostile.started_commands import Starter, pipe, terminal

STOPPED = 3
AT_ONCE = {"SIGHUP": 129, "SIGINT": 130, "SIGTERM": 143}
LATE = 1.5  # seconds: a second signal that does not belong to the first any more

IN_A_ROW: list[tuple[list[str | float], set[int]]] = [
    (["SIGINT", "SIGINT"], {130}),
    (["SIGINT", "SIGINT", "SIGINT"], {130}),
    (["SIGINT", LATE, "SIGINT"], {130}),
    (["SIGTERM", "SIGTERM"], {STOPPED}),
    (["SIGTERM", "SIGTERM", "SIGTERM"], {STOPPED}),
    (["SIGHUP", "SIGHUP"], {STOPPED}),
    (["SIGHUP", "SIGTERM"], {STOPPED}),
    (["SIGTERM", "SIGHUP"], {STOPPED}),
    (["SIGTERM", LATE, "SIGTERM"], {143}),
    (["SIGHUP", LATE, "SIGHUP"], {129}),
    (["SIGHUP", LATE, "SIGTERM"], {143}),
    (["SIGTERM", LATE, "SIGHUP"], {129}),
    (["SIGTERM", "SIGINT"], {130}),
    (["SIGHUP", "SIGINT"], {130}),
    (["SIGINT", LATE, "SIGTERM"], {143}),
    (["SIGINT", "SIGTERM"], {STOPPED, 143}),
    (["SIGTERM", "SIGKILL"], {-9}),
    (["SIGINT", "SIGKILL"], {-9}),
    (["SIGWINCH", "SIGCHLD", "SIGPIPE", "SIGURG"], {0}),
    (["SIGPIPE", "SIGTERM"], {STOPPED}),
    (["group", "SIGINT"], {STOPPED}),
    (["group", "SIGTERM"], {STOPPED}),
    (["group", "SIGHUP", "SIGHUP"], {STOPPED}),
    (["group", "SIGINT", "SIGINT"], {130}),
    (["group", "SIGKILL"], {-9}),
]


@pytest.mark.parametrize(
    ("signals", "codes"),
    some([(" ".join(map(str, each)), (each, codes)) for each, codes in IN_A_ROW], {"SIGINT SIGINT"}),
)
def test_signals_in_a_row(
    signals: list[str | float], codes: set[int], starter: Starter, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    command = starter.start(train_words(), tmp_path, at="update.done:5", signals=signals)
    check_end(command, codes)
    assert command.reached
    run = tmp_path / "run"
    if command.code() == STOPPED:
        assert steps(run)[-1] == checkpoints(run)[-1] == 3
    finish(starter, tmp_path, undisturbed)


TWICE = [
    ("SIGKILL", "run.rewound:1"),
    ("SIGTERM", "step.done:1"),
    ("SIGKILL", "checkpoint.state:1"),
    ("SIGINT", "checkpoint.published:1"),
    ("SIGHUP", "model.written:1"),
]


@pytest.mark.parametrize(("first", "second"), some([(" ".join(each), each) for each in TWICE], set()))
def test_a_run_that_is_stopped_while_it_resumes_resumes_again(
    first: str, second: str, starter: Starter, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    starter.start(train_words(), tmp_path, at="update.done:6", signals=[first]).code()
    command = starter.start(["train", "--resume", "run", "--quiet"], tmp_path, at=second, signals=["SIGKILL"])
    assert command.code() == -9
    finish(starter, tmp_path, undisturbed)


@pytest.mark.parametrize("_", some([("whole run", (0,))], set()))
def test_a_run_that_is_killed_again_and_again_comes_to_its_end(
    _: int, starter: Starter, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    points = ["step.done:1", "metrics.written:1", "checkpoint.tensors:1", "update.done:1", "checkpoint.published:1"]
    words, kills, resumed = train_words(), 0, ["train", "--resume", "run", "--quiet"]
    while True:
        command = starter.start(words, tmp_path, at=points[kills % len(points)], signals=["SIGKILL"])
        kills += command.code() == -9
        words = resumed if (tmp_path / "run" / "config.toml").exists() else words
        if command.code() == 0 or kills == 25:
            break
    assert kills >= 5
    finish(starter, tmp_path, undisturbed)


@pytest.mark.parametrize("name", some([(name, (name,)) for name in ("SIGHUP", "SIGINT", "SIGTERM")], set()))
def test_an_ignored_signal_stays_ignored(
    name: str, starter: Starter, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    """As SIGHUP is under nohup, and SIGINT in a script's background."""
    command = starter.start(train_words(), tmp_path, at="update.done:5", signals=[name, name], ignored=[name])
    check_end(command, {0})
    assert command.reached
    assert not differences(undisturbed, contents(tmp_path / "run"))


@pytest.mark.parametrize("fresh", some([("new interpreter", (True,)), ("fork", (False,))], set()))
def test_under_nohup_sigterm_still_stops(
    fresh: bool, starter: Starter, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    command = starter.start(train_words(), tmp_path, ignored=["SIGHUP", "SIGINT"], fresh=fresh)
    command.wait_until(lambda: 1 in steps(tmp_path / "run"))
    command.signal("SIGHUP", "SIGINT", "SIGTERM", "SIGHUP")
    check_end(command, {STOPPED, 0})
    finish(starter, tmp_path, undisturbed)


@pytest.mark.parametrize("name", some([(name, (name,)) for name in ("SIGTERM", "SIGINT", "SIGKILL")], set()))
def test_a_stopped_process_takes_its_signal_when_it_goes_on(
    name: str, starter: Starter, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    command = starter.start(train_words(), tmp_path)
    command.wait_until(lambda: 1 in steps(tmp_path / "run"))
    command.signal("SIGSTOP", name, "SIGCONT")
    check_end(command, {STOPPED, 0, -9 if name == "SIGKILL" else STOPPED})
    finish(starter, tmp_path, undisturbed)


# The libraries that a new interpreter has mapped when the signal comes: none yet, Python's own, torch's.
MAPPED = ["", "_json", "libtorch_cpu", "tokenizers"]
STARTS = [(f"{name} at {part or 'once'}", (name, part)) for part in MAPPED for name in AT_ONCE]
STARTS.remove(("SIGINT at once", ("SIGINT", "")))  # Python itself prints where, while it sets itself up


@pytest.mark.parametrize(("name", "part"), some(STARTS, {"SIGINT at _json"}))
def test_a_signal_while_a_run_loads_ends_it(
    name: str, part: str, starter: Starter, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    command = starter.start(train_words(), tmp_path, fresh=True)
    maps = Path(f"/proc/{command.pid}/maps")

    def loaded() -> bool:
        return not part or part in maps.read_text() or bool(steps(tmp_path / "run"))

    command.wait_until(loaded)
    command.signal(name)
    # Until Python has set up its own handlers a signal kills the process; and a busy machine may be late with it.
    number = signal.Signals[name]
    check_end(command, {AT_ONCE[name], -number, STOPPED, 0})
    finish(starter, tmp_path, undisturbed)


TYPED = {"Ctrl-C": b"\x03", "Ctrl-C twice": b"\x03\x03", "Ctrl-\\": b"\x1c"}


@pytest.mark.parametrize("keys", some([(name, (name,)) for name in TYPED], set()))
@pytest.mark.parametrize("quiet", [True, False], ids=["lines", "display"])
def test_keys_typed_at_a_terminal(
    keys: str, quiet: bool, starter: Starter, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    with terminal() as screen:
        streams = {"stdin": screen.path, "stdout": screen.path, "stderr": screen.path}
        command = starter.start(train_words(quiet=quiet), tmp_path, **streams)
        command.wait_until(lambda: 1 in steps(tmp_path / "run"))
        screen.type(TYPED[keys])
        check_end(command, {"Ctrl-C": {STOPPED, 0}, "Ctrl-C twice": {130, STOPPED, 0}, "Ctrl-\\": {-3, 0}}[keys])
        assert b"Traceback" not in screen.shown
    finish(starter, tmp_path, undisturbed)


MOMENTS = [(at, quiet) for at in ("start", "warm start", "step 1", "step 4") for quiet in (True, False)]


@pytest.mark.parametrize(
    ("at", "quiet"),
    some([(f"{at} {'lines' if quiet else 'display'}", (at, quiet)) for at, quiet in MOMENTS], {"step 1 display"}),
)
def test_a_closed_terminal_leaves_a_checkpoint(
    at: str, quiet: bool, starter: Starter, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    run = tmp_path / "run"
    begun = {
        "start": lambda: True,
        "warm start": lambda: b"warm start" in screen.shown or bool(steps(run)),
        "step 1": lambda: 1 in steps(run),
        "step 4": lambda: 4 in steps(run),
    }
    with terminal() as screen:
        streams = {"stdin": screen.path, "stdout": screen.path, "stderr": screen.path}
        command = starter.start(train_words(quiet=quiet), tmp_path, **streams)
        command.wait_for_file("opened")
        command.wait_until(begun[at])
        screen.close()
        check_end(command, {STOPPED, 0, 129, -1})
        assert b"Traceback" not in screen.shown
    if command.code() == STOPPED and steps(run):
        assert steps(run)[-1] == checkpoints(run)[-1]
    finish(starter, tmp_path, undisturbed)


STREAMS: dict[str, dict[str, str]] = {
    "stdin closed": {"stdin": "closed"},
    "stdout closed": {"stdout": "closed"},
    "stderr closed": {"stderr": "closed"},
    "all closed": {"stdin": "closed", "stdout": "closed", "stderr": "closed"},
    "stdout full": {"stdout": "/dev/full"},
    "stderr full": {"stderr": "/dev/full"},
    "both full": {"stdout": "/dev/full", "stderr": "/dev/full"},
}


@pytest.mark.parametrize(
    ("streams", "signals"),
    some(
        [(f"{name} {' '.join(signals)}", (name, signals)) for name in STREAMS for signals in ([], ["SIGTERM"])],
        {"stdout full SIGTERM"},
    ),
)
def test_a_run_goes_on_without_its_streams(
    streams: str, signals: list[str], starter: Starter, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    command = starter.start(train_words(), tmp_path, at="update.done:5", signals=signals, **STREAMS[streams])
    check_end(command, {STOPPED if signals else 0})
    finish(starter, tmp_path, undisturbed)


@pytest.mark.parametrize(
    ("lines", "signals"),
    some(
        [(f"{n} lines {' '.join(each)}", (n, each)) for n in (0, 1, 4, 6) for each in ([], ["SIGPIPE", "SIGTERM"])],
        set(),
    ),
)
def test_a_run_whose_reader_goes_goes_on(
    lines: int, signals: list[str], starter: Starter, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    """As `trimtab train | head -1` does in the warm start, and with more lines in a step."""
    path = pipe(tmp_path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    command = starter.start(train_words(), tmp_path, stdout=path, stderr=path, at="update.done:9", signals=signals)
    read = b""

    def enough() -> bool:
        nonlocal read
        if select.select([reader], [], [], 0)[0]:
            with suppress(BlockingIOError):
                read += os.read(reader, 80)
        return read.count(b"\n") >= lines

    command.wait_for_file("opened")
    command.wait_until(enough)
    os.close(reader)
    check_end(command, {STOPPED if signals else 0})
    finish(starter, tmp_path, undisturbed)


@pytest.mark.parametrize(
    "how",
    some(
        [(how, (how,)) for how in ("SIGTERM", "SIGINT", "SIGHUP", "SIGKILL", "group SIGINT", "worker", "workers")],
        set(),
    ),
)
def test_signals_while_workers_grade(how: str, starter: Starter, tmp_path: Path, finished_by_rule: Path) -> None:
    prepare(tmp_path)
    command = starter.start(train_words(OWN_RULE), tmp_path)
    command.wait_until(lambda: 2 in steps(tmp_path / "run"))
    (tmp_path / "hold").touch()
    disturb_grading(command, how, tmp_path)
    if how in {"worker", "workers"}:
        # Verdicts that were lost are given again, or are said to have failed: then the run is another one.
        check_end(command, {0, STOPPED})
        return
    check_end(command, {-9 if how == "SIGKILL" else STOPPED})
    finish(starter, tmp_path, contents(finished_by_rule / "run"), changes=OWN_RULE)


@pytest.mark.parametrize("_", some([("stopped", (0,))], set()))
def test_a_folder_in_use_is_refused_and_free_at_once_when_its_process_is_killed(
    _: int, starter: Starter, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    resume = ["train", "--resume", "run", "--quiet"]
    command = starter.start(train_words(), tmp_path, at="update.planned:6", signals=["SIGSTOP"])
    command.wait_until(lambda: command.reached)
    second = starter.start(resume, tmp_path)
    check_end(second, {2})
    command.signal("SIGKILL")
    assert command.code() == -9
    finish(starter, tmp_path, undisturbed)


@pytest.mark.parametrize(
    ("number", "name"),
    some([(f"{n} {name}", (n, name)) for n in range(3) for name in [*AT_ONCE, "SIGKILL"]], set()),
)
def test_a_signal_at_any_moment(
    number: int, name: str, starter: Starter, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    """A moment that differs from run to run: what is checked holds at every one."""
    moment = random.Random(number).uniform(0, 0.8)
    command = starter.start(train_words(), tmp_path)
    command.wait_until((tmp_path / "run").exists)
    select.select([], [], [], moment)
    command.signal(name)
    check_end(command, {0, STOPPED, AT_ONCE.get(name, -9)})
    run = tmp_path / "run"
    if command.code() == STOPPED and steps(run):
        assert steps(run)[-1] == checkpoints(run)[-1]
    finish(starter, tmp_path, undisturbed)
