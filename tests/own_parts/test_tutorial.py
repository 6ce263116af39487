"""docs/own-parts.md as a user lives it: a file of one's own beside a recipe, outside of the package.

The file is examples/own_parts/mine.py, which the page shows.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import trimtab as tt
from trimtab import own_parts
from trimtab.cli import app
from trimtab.experiments.grid import Grid, parse_axis
from trimtab.trainer.config import load

WriteFile = Callable[[str, str], Path]
EXAMPLE = Path(__file__).parents[2] / "examples" / "own_parts"
GENTLE, CALM = "python:mine:gentle", "python:mine:calm"
QUICK = ("--set", "run.report=false", "--set", "warm_start.steps=2")


def trimtab(*arguments: str) -> str:
    """Run a command that must succeed; return what it prints."""
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def project(own_file: WriteFile, tmp_path: Path) -> Path:
    """A user's folder with a recipe and a file of parts; the current folder is the one above it."""
    return Path(shutil.copytree(EXAMPLE, tmp_path / "project"))


def test_a_file_of_ones_own_from_the_dry_run_to_the_replay(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # First a look at the method, from beside its file: its formula, and its option with our words for it.
    monkeypatch.chdir(project)
    page = trimtab("methods", GENTLE)
    assert "DAPO with a narrower clip range." in page and "| `softness` | 0.5 | share of DAPO's clip range |" in page
    monkeypatch.chdir(project.parent)

    # A dry run finds every mistake, and shows the objective with its numbers. The module is found beside the recipe.
    shown = trimtab("train", "project/mine.toml", "--dry-run")
    assert f"{GENTLE} + {CALM}: DAPO with a narrower clip range." in shown
    assert "clip(r, 0.84, 1.224)" in shown and "w = 0.5 where ln p < -2" in shown  # softness = 0.8
    assert "advantage   python:mine:above_mean" in shown
    assert "a task with 100 problems" in shown

    # Training: problems, solutions, a graded and a batched rule, sampler, method and advantage are all ours.
    trimtab("train", "project/mine.toml", "--out", "run", "--quiet", *QUICK)
    steps = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in steps] == [0, 1, 2, 3]
    assert "eval/accuracy" in steps[0] and "tokens/damped_share" in steps[1]
    graded = [16 * record["rewards/task"] for record in steps[1:]]
    assert any(total != round(total) for total in graded), "right or wrong alone would give whole numbers"
    assert all("rewards/brief" in record for record in steps[1:])

    # It is resumed from any folder: the run's configuration says where the module is.
    elsewhere = project.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    trimtab("train", "--resume", "../run", "--set", "run.steps=4", "--quiet", *QUICK)
    monkeypatch.chdir(project.parent)
    assert len(Path("run/metrics.jsonl").read_text().splitlines()) == 5

    # What the records hold is planned again: under the run's own objective to the last bit, and with other options.
    objectives = ("--objective", "recorded", "--objective", GENTLE)
    trimtab("replay", "run", *objectives, "--sweep", "softness=0.1,1", "--json", "replay.json")
    named = json.loads(Path("replay.json").read_text())["objectives"]
    assert named[:2] == [f"recorded softness={value} ({GENTLE} + {CALM})" for value in (0.1, 1)]
    assert named[2:] == [f"{GENTLE} softness=0.1", f"{GENTLE} softness=1"]
    report = trimtab("report", "run", "--objective", GENTLE)
    assert "written" in report and CALM in Path("run/report.html").read_text()


def test_others_plan_to_compare_and_stress_it(project: Path) -> None:
    runs = Grid((GENTLE, f"{GENTLE} + s2t"), Path("out"), "project/mine.toml", seeds=1).plan()
    assert [run.name for run in runs] == ["python-mine-gentle-seed0", "python-mine-gentle+s2t-seed0"]
    axes = (parse_axis("objective.softness=0.2,1"),)
    Grid((GENTLE,), Path("out"), "project/mine.toml", seeds=1, settings=("run.steps=20",), axes=axes).plan()


@pytest.mark.slow
def test_a_comparison_trains_it(project: Path) -> None:
    compared = trimtab(
        *("compare", f"{GENTLE} + s2t", "--recipe", "project/mine.toml", "--seeds", "1", "--out", "out"),
        *("--set", "run.steps=1", "--set", "run.eval_every=0", *QUICK),
    )
    assert "1/1" in compared


def test_a_run_of_somebody_else_chooses_no_code(project: Path) -> None:
    trimtab("train", "project/mine.toml", "--out", "run", "--quiet", "--set", "run.steps=1", *QUICK)
    own_parts._loaded.clear()  # as in a new process
    (project / "mine.py").unlink()
    for command in (["alarms", "run"], ["report", "run"]):
        trimtab(*command)
    done = CliRunner().invoke(app, ["replay", "run"])
    assert done.exit_code == 2
    assert f"was recorded with '{GENTLE}', code of its own: to run it, name it too: --objective" in done.stderr
    assert not own_parts._loaded


def test_the_page_and_its_notebook_example(own_file: WriteFile, capsys: pytest.CaptureFixture[str]) -> None:
    page = (EXAMPLE.parents[1] / "docs" / "own-parts.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    exec(compile(code, "docs/own-parts.md", "exec"), {})
    assert "clip(r, 0.95, 1.05)" in capsys.readouterr().out
    for part in ("gentle", "calm", "above_mean", "doubling", "near", "brief", "Warmer"):
        assert f"{part}(" in page or f"class {part}" in page


def test_an_advantage_and_a_task_by_hand(project: Path) -> None:
    config = load("project/mine.toml")
    objective = config.build_objective()
    assert objective.advantages([1.0, 0.0, 0.5, 0.5], [0, 0, 1, 1]).tolist() == [0.5, -0.5, 0.0, 0.0]
    assert isinstance(objective, tt.Objective)
    assert config.task.arguments == {"digits": 1, "size": 100}
