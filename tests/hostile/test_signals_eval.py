"""Signals and kills during `eval`: it ends at once, its finished batches are on the disk, no process is left.

The same command again draws the rest, and gives what it gives undisturbed.
"""

from __future__ import annotations

import json
import random
import select
import shutil
from pathlib import Path
from typing import Any

import pytest

from helpers.evaluate.small_evals import hang, serving, write_sums
from helpers.hostile.disturbed_runs import check_end, disturb_grading, each, prepare, some
from helpers.hostile.started_commands import Starter, terminal, unread_pipe
from helpers.made_once import made_once

AT_ONCE = {"SIGHUP": 129, "SIGINT": 130, "SIGTERM": 143}
ENDS = {**AT_ONCE, "SIGKILL": -9}
SUMS = [(f"{a}+{b}=", str(a + b)) for a in range(4) for b in range(3)]
STREAMS: dict[str, dict[str, str]] = {
    "stdin closed": {"stdin": "closed"},
    "stdout closed": {"stdout": "closed"},
    "all closed": {"stdin": "closed", "stdout": "closed", "stderr": "closed"},
    "stdout full": {"stdout": "/dev/full"},
    "both full": {"stdout": "/dev/full", "stderr": "/dev/full"},
}


def cases(names: dict[str, int], points: list[str]) -> list[tuple[str, tuple[str, str]]]:
    return [(f"{name} at {at}", (name, at)) for at in points for name in names]


def eval_words(run: Path, *more: object) -> list[object]:
    """Return the words that evaluate a run's model on twelve sums, three samples each, in batches of two problems."""
    what = ["--benchmarks", "gsm8k", "--data", "data", "--samples", 3, "--max-new-tokens", 6, "--suffix", ""]
    how = ["--rule", "number", "--batch", 6, "--device", "cpu", "--out", "out", "--quiet"]
    return ["eval", run, *what, *how, *more]


def evaluated(folder: Path) -> dict[str, list[Any]]:
    """Return the lines of an evaluation's responses and verdicts, without how long grading took, and its figures."""
    out = folder / "out"
    verdicts = [json.loads(line) for line in (out / "verdicts.jsonl").read_text().splitlines()]
    return {
        "generations": (out / "generations.jsonl").read_text().splitlines(),
        "verdicts": [{**verdict, "seconds": None} for verdict in verdicts],
        "figures": (out / "result.md").read_text().splitlines(),
    }


def whole_lines(path: Path) -> list[str]:
    """Return the lines of a file that are whole."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith("\n")]


@pytest.fixture(scope="session")
def evaluation(starter: Starter, shared: Path, finished: Path) -> dict[str, list[Any]]:
    """An evaluation that was left alone."""

    def make(folder: Path) -> None:
        write_sums(folder / "data", SUMS)
        check_end(starter.start(eval_words(finished / "run"), folder), {0})

    return evaluated(made_once(shared, "evaluation-left-alone", make))


IN_EVAL = [*(f"generations.written:{n}" for n in (1, 2, 4, 6)), *(f"file.written:{n}" for n in (1, 2, 3, 4))]


@pytest.mark.parametrize(("name", "at"), some(cases(ENDS, IN_EVAL), {"SIGKILL at generations.written:2"}))
def test_an_evaluation_goes_on_where_it_was(
    name: str, at: str, starter: Starter, tmp_path: Path, finished: Path, evaluation: dict[str, list[Any]]
) -> None:
    write_sums(tmp_path / "data", SUMS)
    words = eval_words(finished / "run")
    command = starter.start(words, tmp_path, at=at, signals=[name])
    check_end(command, {ENDS[name]} if command.code() or command.reached else {0})
    done = whole_lines(tmp_path / "out" / "generations.jsonl")
    if at.startswith("generations"):
        assert len(done) >= 6 * (int(at[-1]) - (name == "SIGKILL")), "a finished batch is not on the disk"
    check_end(starter.start(words, tmp_path), {0})
    assert evaluated(tmp_path) == evaluation
    assert whole_lines(tmp_path / "out" / "generations.jsonl")[: len(done)] == done, "a response was drawn again"


@pytest.mark.parametrize(
    "signals",
    some(
        [(" ".join(signals), (signals,)) for signals in (["SIGINT", "SIGINT"], ["SIGTERM", "SIGTERM"],
         ["SIGHUP", "SIGTERM", "SIGINT"], ["group", "SIGINT"], ["group", "SIGHUP", "SIGHUP"], ["SIGTERM", "SIGKILL"])],
        set(),
    ),
)  # fmt: skip
def test_signals_in_a_row_end_an_evaluation_once(
    signals: list[str], starter: Starter, tmp_path: Path, finished: Path, evaluation: dict[str, list[Any]]
) -> None:
    write_sums(tmp_path / "data", SUMS)
    words = eval_words(finished / "run")
    command = starter.start(words, tmp_path, at="generations.written:3", signals=signals)
    check_end(command, {ENDS[name] for name in signals if name != "group"})
    check_end(starter.start(words, tmp_path), {0})
    assert evaluated(tmp_path) == evaluation


@pytest.mark.parametrize(
    ("number", "name"), some([(f"{n} {name}", (n, name)) for n in range(2) for name in ENDS], set())
)
def test_an_evaluation_signalled_at_any_moment_goes_on(
    number: int, name: str, starter: Starter, tmp_path: Path, finished: Path, evaluation: dict[str, list[Any]]
) -> None:
    write_sums(tmp_path / "data", SUMS)
    words = eval_words(finished / "run")
    command = starter.start(words, tmp_path)
    command.wait_until((tmp_path / "out").exists)
    select.select([], [], [], random.Random(number).uniform(0, 0.3))
    command.signal(name)
    check_end(command, {0, ENDS[name]})
    check_end(starter.start(words, tmp_path), {0})
    assert evaluated(tmp_path) == evaluation


@pytest.mark.parametrize("streams", some(each(STREAMS), set()))
def test_an_evaluation_goes_on_without_its_streams(
    streams: str, starter: Starter, tmp_path: Path, finished: Path, evaluation: dict[str, list[Any]]
) -> None:
    write_sums(tmp_path / "data", SUMS)
    check_end(starter.start(eval_words(finished / "run"), tmp_path, **STREAMS[streams]), {0})
    assert evaluated(tmp_path) == evaluation


@pytest.mark.parametrize("streams", some(each(["reader gone", "terminal closed"]), set()))
def test_an_evaluation_whose_output_goes_away(
    streams: str, starter: Starter, tmp_path: Path, finished: Path, evaluation: dict[str, list[Any]]
) -> None:
    write_sums(tmp_path / "data", SUMS)
    words = eval_words(finished / "run")
    if streams == "reader gone":
        with unread_pipe(tmp_path) as path:
            command = starter.start(words, tmp_path, stdout=path, stderr=path)
            command.wait_until((tmp_path / "out").exists)
        check_end(command, {0})
    else:
        with terminal() as screen:
            command = starter.start(words, tmp_path, stdin=screen.path, stdout=screen.path, stderr=screen.path)
            command.wait_until((tmp_path / "out").exists)
            screen.close()
            check_end(command, {0, 129})
        check_end(starter.start(words, tmp_path), {0})
    assert evaluated(tmp_path) == evaluation


@pytest.mark.parametrize("name", some(each([*ENDS, "SIGINT SIGINT", "SIGSTOP SIGTERM SIGCONT"]), set()))
def test_a_silent_server_does_not_keep_an_evaluation_from_ending(name: str, starter: Starter, tmp_path: Path) -> None:
    """The server answers a few requests and then no more; the timeout of a request is far longer than the test."""
    write_sums(tmp_path / "data", SUMS)
    with serving(*[hang] * 1000) as server:
        where = ["--endpoint", server.url, "--model-name", "tiny", "--concurrency", 2, "--timeout", 1e5]
        words = [eval_words(tmp_path)[0], *eval_words(tmp_path, *where)[2:]]
        server.script.clear()
        server.script.extend([server.otherwise] * 3 + [hang] * 1000)
        command = starter.start(words, tmp_path)
        command.wait_until(lambda: len(server.requests) >= 5)
        done = whole_lines(tmp_path / "out" / "generations.jsonl")
        command.signal(*name.split())
        check_end(command, {ENDS.get(name, ENDS.get(name.split()[1] if " " in name else name, 0))})
        assert whole_lines(tmp_path / "out" / "generations.jsonl")[: len(done)] == done
        server.script.clear()
        check_end(starter.start(words, tmp_path), {0})
        lines = [json.loads(line) for line in whole_lines(tmp_path / "out" / "generations.jsonl")]
        assert len({(line["problem"], line["sample"]) for line in lines}) == len(lines) == 3 * len(SUMS)


@pytest.mark.parametrize("name", some(each(ENDS), set()))
def test_a_regrading_that_is_ended_leaves_the_verdicts_whole(
    name: str, starter: Starter, tmp_path: Path, shared: Path, evaluation: dict[str, list[Any]]
) -> None:
    shutil.copytree(shared / "evaluation-left-alone", tmp_path, dirs_exist_ok=True)
    words = ["eval", "--regrade", "out", "--rule", "exact", "--quiet"]
    command = starter.start(words, tmp_path, at="file.written:1", signals=[name])
    check_end(command, {ENDS[name]})
    assert evaluated(tmp_path)["generations"] == evaluation["generations"]
    check_end(starter.start(words, tmp_path), {0})
    again = starter.start(["eval", "--regrade", "out", "--rule", "number", "--quiet"], tmp_path)
    check_end(again, {0})
    assert evaluated(tmp_path)["generations"] == evaluation["generations"]


@pytest.mark.parametrize("how", some(each([*ENDS, "group SIGINT", "worker", "workers"]), set()))
def test_signals_while_an_evaluation_is_graded(how: str, starter: Starter, tmp_path: Path, finished: Path) -> None:
    prepare(tmp_path)
    write_sums(tmp_path / "data", SUMS[:2])
    (tmp_path / "hold").touch()
    words = eval_words(finished / "run", "--rule", "python:rules:even")
    command = starter.start(words, tmp_path)
    disturb_grading(command, how, tmp_path)
    if how.startswith("worker"):
        check_end(command, {0})
    else:
        check_end(command, {ENDS[how.rsplit(maxsplit=1)[-1]]})
        check_end(starter.start(words, tmp_path), {0})
    texts = [json.loads(line)["text"] for line in whole_lines(tmp_path / "out" / "generations.jsonl")]
    kinds = [json.loads(line)["kind"] for line in whole_lines(tmp_path / "out" / "verdicts.jsonl")]
    right = ["correct" if len(text) % 2 == 0 else "wrong" for text in texts]
    assert len(kinds) == len(right)
    lost = [kind for kind, expected in zip(kinds, right, strict=True) if kind != expected]
    assert set(lost) <= ({"crashed"} if how.startswith("worker") else set())
