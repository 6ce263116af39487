"""`trimtab report`, and the report that ends a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from helpers.insight.report_runs import Made, data_of, make_run
from trimtab.cli import app
from trimtab.insight import report as reporting

RECIPE = """
[model]
path = "demo"
[warm_start]
steps = 0
[rollout]
prompts = 4
samples = 4
max_new_tokens = 4
[run]
steps = 2
eval_every = 0
threads = 1
device = "cpu"
"""


def trimtab(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", Made(steps=2))


def test_a_report_goes_into_the_runs_folder(run: Path) -> None:
    result = trimtab("report", run)
    assert result.exit_code == 0
    assert f"written: {run / 'report.html'}" in result.stdout and "MB" in result.stdout
    assert (run / "report.html").stat().st_size > 50_000


def test_or_wherever_it_is_wanted(run: Path, tmp_path: Path) -> None:
    where = tmp_path / "new" / "folder" / "page.html"
    assert trimtab("report", run, "--out", where).exit_code == 0
    assert where.exists() and not (run / "report.html").exists()


@pytest.mark.parametrize("values", [(1e308,), (1e308, -1e308, 0.5), (1e38, -1e38), (5e-324, 0.5)])
def test_metrics_of_any_size_end_in_a_report(run: Path, tmp_path: Path, values: tuple[float, ...]) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [
        {**lines[-1], **{key: values[step % len(values)] for key in lines[-1]}, "step": step} for step in range(1, 40)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    other = make_run(tmp_path / "other", Made(steps=2))
    for command in (["alarms", run], ["report", run], ["report", run, other, "--out", tmp_path / "both.html"]):
        assert trimtab(*command).exit_code == 0, command


def test_the_compared_objectives_and_the_steps_can_be_chosen(run: Path) -> None:
    assert trimtab("report", run, "--objective", "gspo", "--objective", "sspo + s2t", "--step", 2).exit_code == 0
    shown = data_of((run / "report.html").read_text(encoding="utf-8"))["runs"][0]
    assert shown["compared_objectives"] == ["gspo", "sspo + s2t"]
    assert sum(entry["step"] == 2 and "requested" in entry["selected_for"] for entry in shown["responses"]) == 4


def test_the_help_names_the_objectives_that_are_compared_by_default() -> None:
    text = " ".join(trimtab("report", "--help").stdout.split())
    assert f"Compare with this objective. Can be repeated. Default: {', '.join(reporting.COMPARED_OBJECTIVES)}." in text


@pytest.mark.parametrize(
    ("records", "recorded"), [(True, "the nearest of the 2 recorded steps, 1 to 2, is 2"), (False, "no step is")]
)
def test_a_step_that_is_not_recorded_is_named_with_those_that_are(run: Path, records: bool, recorded: str) -> None:
    if not records:
        shutil.rmtree(run / "tokens")
    result = trimtab("report", run, "--step", 9999)
    assert result.exit_code == 0 and f"warning: run: step 9999 is not recorded: {recorded}" in result.stderr


def test_the_reasons_of_an_ablation_are_its_own(run: Path) -> None:
    assert trimtab("report", run, "--objective", "stapo", "--objective", "stapo(mask=random)").exit_code == 0
    shown = data_of((run / "report.html").read_text(encoding="utf-8"))["runs"][0]
    random_mask = {"2": "silenced: picked at random from the rewarded tokens"}
    assert shown["reason_text"] == [{}, {}, random_mask]


def test_several_runs_need_a_place(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", Made(steps=2))
    result = trimtab("report", run, other)
    assert result.exit_code == 2 and "--out FILE" in result.stderr
    assert trimtab("report", run, other, "--out", tmp_path / "both.html").exit_code == 0
    data = data_of((tmp_path / "both.html").read_text(encoding="utf-8"))
    assert data["title"] == "2 runs" and [one["name"] for one in data["runs"]] == ["run", "other"]
    assert data["groups"][0]["runs"] == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is no run: there is no such folder"),
        (["run", "--out", "."], "is a folder; name a file"),
        (["run", "--objective", "stapoo"], "stapo"),
    ],
)
def test_what_is_wrong_is_said_in_words(
    run: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(run.parent)
    result = trimtab("report", *arguments)
    assert result.exit_code == 2 and message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(RECIPE)
    return tmp_path / "tiny.toml"


def test_a_run_ends_with_its_report_and_the_summary_names_it(recipe: Path) -> None:
    result = trimtab("train", recipe, "--out", "run")
    assert result.exit_code == 0
    assert "report      run/report.html" in result.stdout
    page = Path("run/report.html").read_text(encoding="utf-8")
    assert data_of(page)["runs"][0]["responses"]


def test_a_run_need_not_end_with_a_report(recipe: Path) -> None:
    result = trimtab("train", recipe, "--out", "run", "--set", "run.report=false")
    assert result.exit_code == 0 and "report.html" not in result.stdout
    assert not Path("run/report.html").exists()


def test_a_report_that_fails_is_a_warning_and_the_run_succeeds(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(reporting.page, "page_data", fail)
    result = trimtab("train", recipe, "--out", "run")
    assert result.exit_code == 0
    assert "no report of run could be written" in result.stderr and "no memory" in result.stderr
    assert "Trained the demo model" in result.stdout and "report.html" not in result.stdout
    assert sorted(path.name for path in Path("run").glob("*report*")) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("no memory")])
def test_the_summary_does_not_name_the_report_of_an_earlier_part_of_the_run(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    trimtab("train", recipe, "--out", "run")
    monkeypatch.setattr(reporting.page, "page_data", fail)
    result = trimtab("train", "--resume", "run", "--set", "run.steps=3")
    assert "3 of 3 steps" in result.stdout and Path("run/report.html").exists()
    assert "report.html" not in result.stdout


def test_a_report_that_cannot_be_written_leaves_no_half_of_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pages(*_: object) -> object:
        yield "half"
        raise OSError("disk full")

    before = "<title>the one before · trimtab report</title>"
    (run / "report.html").write_text(before)
    monkeypatch.setattr(reporting.page, "page", pages)
    result = trimtab("report", run)
    assert result.exit_code == 2 and "disk full" in result.stderr
    assert (run / "report.html").read_text() == before
    assert sorted(path.name for path in run.glob("*report*")) == ["report.html"]
    assert not list(run.glob(".report*"))
