"""Lines of steps: what is no line of a step is left out and named, and a line cut off at the end is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trimtab.record.step_lines import LONGEST_LINE, iter_step_lines, last_step, read_metrics
from trimtab.trainer.train import RunFolder

BAD = [
    "[1]",
    "1",
    '{"no": 1}',
    '{"step": -1}',
    '{"step": 2147483648}',
    '{"step": "1"}',
    '{"step": null}',
    "x",
    "[" * 9_999,
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad[:20])
def test_a_line_without_a_step_is_named_with_its_file_and_row(tmp_path: Path, bad: str) -> None:
    path, problems = tmp_path / "metrics.jsonl", list[str]()
    path.write_text(f'{{"step": 1}}\n\n{bad}\n{{"step": 2.0}}\n')
    assert [row["step"] for row in iter_step_lines(path, problems.append)] == [1, 2]
    assert len(problems) == 1 and problems[0].startswith(f"{path}, row 3: ") and len(problems[0]) < 600
    assert last_step(path) == 2


def test_a_last_line_that_was_cut_off_is_no_news(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "rew')
    assert [row["step"] for row in iter_step_lines(path, pytest.fail)] == [1]
    assert last_step(path) == 1


def test_a_line_longer_than_any_of_ours_is_one_line(tmp_path: Path) -> None:
    path, problems = tmp_path / "metrics.jsonl", list[str]()
    path.write_text('{"step": 1, "x": "' + "x" * 3 * LONGEST_LINE + '"}\n[]\n{"step": 2}\n')
    assert [row["step"] for row in iter_step_lines(path, problems.append)] == [2]
    assert [problem.partition(": ")[0] for problem in problems] == [f"{path}, row 1", f"{path}, row 2"]


def test_a_named_pipe_or_a_folder_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    problems: list[str] = []
    for path in (tmp_path / "pipe", tmp_path):
        assert list(iter_step_lines(path, problems.append)) == []
        assert last_step(path) == 0
    assert problems == [f"{tmp_path / 'pipe'} is not a file", f"{tmp_path} is not a file"]


def test_metrics_are_the_numbers_that_a_float_can_hold(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "a": 1, "b": NaN, "c": 1' + "0" * 400 + ', "d": "x", "e": true, "f": 1e999, "g": [], "h": 0.5}\n'
    )
    assert read_metrics(path, pytest.fail) == [{"step": 1, "a": 1, "h": 0.5}]


def test_resuming_names_the_lines_that_it_drops(tmp_path: Path) -> None:
    folder, problems = RunFolder(tmp_path), list[str]()
    for path in (folder.metrics, folder.alarms, folder.nonfinite):
        path.write_text('{"step": 1}\n{"no": 1}\n{"step": 3}\n')
    folder.rewind(2, problems.append)
    assert [problem.partition(": ")[0] for problem in problems] == [
        f"{path}, row 2" for path in (folder.metrics, folder.nonfinite, folder.alarms)
    ]
    assert folder.metrics.read_text() == '{"step": 1}\n'
