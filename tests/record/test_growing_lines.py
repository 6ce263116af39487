"""Following a file that grows: every line once, and all of it again when it was written anew."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.record import GrowingLines
from trimtab.record.growing_lines import CHUNK
from trimtab.record.step_lines import LONGEST_LINE


def line(step: int, **more: float) -> str:
    return json.dumps({"step": step, **more}) + "\n"


def steps(lines: GrowingLines) -> list[int]:
    return [row["step"] for _, row in lines.read()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_only_new_lines_are_read(path: Path) -> None:
    lines = GrowingLines(path)
    assert steps(lines) == []
    append(path, line(1) + line(2))
    assert steps(lines) == [1, 2]
    assert steps(lines) == []
    append(path, line(3))
    assert steps(lines) == [3] and lines.generation == 0


def test_half_a_line_waits_for_its_end(path: Path) -> None:
    lines = GrowingLines(path)
    whole = line(1, reward=0.25)
    append(path, whole[:9])
    assert steps(lines) == [] and lines.bad == 0
    append(path, whole[9:])
    assert steps(lines) == [1] and lines.bad == 0


def test_a_whole_last_line_without_its_newline_is_read_once(path: Path) -> None:
    lines = GrowingLines(path)
    append(path, line(1).rstrip("\n"))
    assert steps(lines) == [1]
    append(path, "\n" + line(2))
    assert steps(lines) == [2] and lines.bad == 0


@given(st.lists(st.integers(1, 60), max_size=12))
@settings(max_examples=60, deadline=None)
def test_however_the_text_arrives_every_line_comes_once(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int]
) -> None:
    path = tmp_path_factory.mktemp("cuts") / "metrics.jsonl"
    text = "".join(line(step, value=step / 7) for step in range(1, 12)) + "no json\n" + line(12)
    lines, found, start = GrowingLines(path), list[int](), 0
    for cut in [*cuts, len(text)]:
        append(path, text[start : start + cut])
        start += cut
        found += steps(lines)
    assert found == list(range(1, 13)) and lines.bad == 1 and lines.generation == 0


def test_a_resumed_run_that_replaces_its_file_is_read_again(path: Path) -> None:
    lines = GrowingLines(path)
    append(path, line(1) + line(2) + line(3))
    assert steps(lines) == [1, 2, 3]
    new = path.with_name("new")
    new.write_text(line(1) + line(2))
    new.replace(path)
    assert steps(lines) == [1, 2] and lines.generation == 1
    append(path, line(3))
    assert steps(lines) == [3] and lines.generation == 1


@pytest.mark.parametrize("after", ["", line(7), line(7) + line(8) + line(9) + line(10)])
def test_a_file_that_was_cut_or_written_over_is_read_again(path: Path, after: str) -> None:
    lines = GrowingLines(path)
    append(path, line(1) + line(2) + line(3))
    assert steps(lines) == [1, 2, 3]
    path.write_text(after)
    os.utime(path, ns=(1, 1))
    assert steps(lines) == [json.loads(each)["step"] for each in after.splitlines()]
    assert lines.generation == 1


def test_a_removed_file_is_forgotten_and_a_new_one_read(path: Path) -> None:
    lines = GrowingLines(path)
    append(path, line(1))
    assert steps(lines) == [1]
    path.unlink()
    assert steps(lines) == [] and lines.generation == 1
    append(path, line(5))
    assert steps(lines) == [5] and lines.generation == 1


def test_a_link_and_a_pipe_are_not_read(path: Path) -> None:
    elsewhere = path.with_name("secret.jsonl")
    elsewhere.write_text(line(1))
    path.symlink_to(elsewhere)
    lines = GrowingLines(path)
    assert steps(lines) == [] and "metrics.jsonl cannot be read" in lines.problem
    path.unlink()
    os.mkfifo(path)
    assert steps(lines) == [] and lines.problem == "metrics.jsonl is not a file"


def test_a_line_without_end_is_skipped_and_not_kept(path: Path) -> None:
    lines = GrowingLines(path)
    with path.open("wb") as file:
        file.write(line(1).encode() + b"x" * (3 * LONGEST_LINE + CHUNK // 2))
    assert steps(lines) == [1]
    append(path, "x" * LONGEST_LINE + "\n" + line(2))
    assert steps(lines) == [2] and lines.bad == 1


def test_lines_are_read_once_more_from_their_place(path: Path) -> None:
    lines = GrowingLines(path)
    append(path, line(1) + line(2) + line(3))
    places = [place for place, _ in lines.read()]
    assert [row["step"] for row in lines.lines_from(places[1])] == [2, 3]
