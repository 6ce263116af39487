"""`trimtab replay` as a user runs it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.record.made_records import made_run, made_step, record
from trimtab.cli import app
from trimtab.insight.replay.tables import parse_span

run = CliRunner()


def replayed(*arguments: object, width: int = 200) -> str:
    result = run.invoke(app, ["replay", *map(str, arguments)], env={"COLUMNS": str(width)})
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments: object) -> str:
    result = run.invoke(app, ["replay", *map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and "Traceback" not in result.output
    return result.output


@pytest.fixture(autouse=True)
def in_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are printed: relative ones keep the length of the temporary folder's name out of the line breaks."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def folder() -> Path:
    return made_run(Path("run"), 3, objective={"name": "stapo", "tau_p": 0.2, "quantile": 1.0})


def test_a_run_is_replayed_under_its_own_objective(folder: Path) -> None:
    out = replayed(folder)
    assert "recorded (stapo)" in out and "silenced" in out and "steps 1 to 3, 30 tokens" in out
    assert "Jaccard" not in out, "there is nothing to compare it with"


def test_several_objectives_come_with_how_far_they_agree(folder: Path) -> None:
    out = replayed(folder, "--objective", "recorded", "--objective", "sspo + s2t", "--objective", "gspo")
    rows = [line for line in out.splitlines() if "sspo + s2t" in line]
    assert len(rows) == 3, "one for what it does, two for its pairs"
    assert "Jaccard" in out and "same reason" in out and "clipped" in out


def test_a_sweep_has_a_row_for_every_value(folder: Path) -> None:
    out = replayed(folder, "--objective", "stapo", "--sweep", "tau_p=0.0005,0.2,0.9")
    assert all(f"stapo tau_p={value}" in out for value in ("0.0005", "0.2", "0.9"))


def test_only_some_steps(folder: Path) -> None:
    assert "steps 2 to 3, 20 tokens" in replayed(folder, "--steps", "2:")
    assert "steps 2 to 2, 10 tokens" in replayed(folder, "--steps", "2")


def test_everything_goes_into_a_file_too(folder: Path, tmp_path: Path) -> None:
    replayed(folder, "--objective", "stapo", "--objective", "dapo", "--json", tmp_path / "out.json")
    table = json.loads((tmp_path / "out.json").read_text())
    assert table["objectives"] == ["stapo", "dapo"] and [step["step"] for step in table["steps"]] == [1, 2, 3]
    assert {"tokens", "touched", "reasons", "entropy_change", "total", "updates"} <= set(table["stats"][0])


def test_many_pairs_are_cut_short(folder: Path) -> None:
    arguments = [
        argument for name in ("grpo", "dapo", "gspo", "sspo", "stapo", "stare") for argument in ("--objective", name)
    ]
    assert "the nearest 12 of 15 pairs" in replayed(folder, *arguments)


def test_a_recorded_share_is_noted() -> None:
    record(Path("run"), [made_step(1, sampled=40)])
    assert "planned over the recorded share of the mini-batch" in replayed("run", width=400)


def test_a_path_cannot_control_the_terminal() -> None:
    name = "evil\x1b]0;title\x07"
    made_run(Path(name), 1)
    out = replayed(name, width=400)
    assert "\x1b]0" not in out and "\\x1b" in out


def test_markup_in_a_name_is_only_text() -> None:
    made_run(Path("[red]run[link=x]"), 1)
    assert "[red]run[link=x]" in replayed("[red]run[link=x]", width=400)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--objective", "stapoo"], "did you mean stapo"),
        (["--objective", "grpo + kl"], "reads `ref_logp`"),
        (["--sweep", "tau_p"], "write option=value"),
        (["--sweep", "colour=1"], "has an option of that name"),
        (["--steps", "a:b"], "write first:last"),
        (["--steps", "1:2:3"], "write first:last"),
        (["--steps", "9:"], "none of the steps asked for is recorded"),
        (["--json", "/nowhere/at/all.json"], "No such file"),
    ],
)
def test_errors_say_what_to_do(folder: Path, arguments: list[str], message: str) -> None:
    assert message in refused(folder, *arguments)


def test_a_folder_without_records_is_an_error() -> None:
    assert "holds no records" in refused(".")
    assert "holds no records" in refused("nowhere")


def test_damaged_steps_are_named_and_the_rest_is_shown(folder: Path) -> None:
    os.truncate(folder / "tokens/step-00000002/tokens.parquet", 100)
    out = replayed(folder)
    assert "20 tokens" in out
    assert "step-00000002/tokens.parquet is damaged" in out and "step 2 is left out" in out


@pytest.mark.parametrize(
    ("text", "span"),
    [(None, (None, None)), ("3:9", (3, 9)), ("3:", (3, None)), (":9", (None, 9)), ("4", (4, 4)), (":", (None, None))],
)
def test_spans_of_steps(text: str | None, span: tuple[int | None, int | None]) -> None:
    assert parse_span(text) == span
