"""`trimtab stress` runs every objective under every stress once, ends what has collapsed and says who held longest."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from helpers.insight.report_runs import data_of
from trimtab.cli import app
from trimtab.experiments.grid import Grid, GridRun, parse_axis, read_stress, show_grid
from trimtab.experiments.grid.stress import as_table
from trimtab.files import locked
from trimtab.trainer.config import load
from trimtab.trainer.train.run_folder import resolved_toml

RECIPE = """
[task]
size = 12
[warm_start]
steps = 2
batch_size = 4
[rollout]
prompts = 4
samples = 4
max_new_tokens = 4
max_prompt_tokens = 16
[reward]
overlong_buffer = 4
[run]
steps = 11
eval_problems = 4
threads = 1
device = "cpu"
"""


LR = "update.lr=1e-4,1e-2"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("recipe") / "tiny.toml"
    path.write_text(RECIPE)
    return str(path)


def trimtab(*words: object) -> Result:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def figures(out: Path) -> dict[str, dict[str, Any]]:
    """The runs of stress.json by their folder."""
    return {run["folder"]: run for run in json.loads((out / "stress.json").read_text())["runs"]}


# The real thing, with the runs in this process: starting torch for each of them would take most of the time.


class InThisProcess:
    """Stands for a process that runs a command of trimtab, and has ended once it is made."""

    def __init__(self, command: list[str], stdout: Any, **_: Any) -> None:
        result = CliRunner().invoke(app, command[command.index("trimtab") + 1 :])
        stdout.write(result.output.encode())
        self.returncode = result.exit_code
        self.stdin = SimpleNamespace(close=lambda: None)

    def poll(self) -> int:
        return self.returncode


def run_in_this_process(patch: pytest.MonkeyPatch) -> None:
    popen = SimpleNamespace(PIPE=subprocess.PIPE, Popen=InThisProcess)
    patch.setattr("trimtab.experiments.grid.pool.subprocess", popen)


@pytest.fixture(scope="module")
def stressed(recipe: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[object], Result]:
    out = tmp_path_factory.mktemp("stressed")
    words = ["stress", "grpo", "sspo + s2t", "--axis", LR, "--seeds", 1, "--recipe", recipe, "--out", out]
    with pytest.MonkeyPatch.context() as patch:
        run_in_this_process(patch)
        return out, words, trimtab(*words)


def test_every_objective_is_trained_under_every_stress(stressed: tuple[Path, list[object], Result]) -> None:
    out, _, result = stressed
    assert result.exit_code == 0, result.output
    names = [f"{name}-update.lr={lr}-seed0" for lr in ("1e-4", "1e-2") for name in ("grpo", "sspo+s2t")]
    assert list(figures(out)) == names
    for name in names:
        weights = [path.name for path in (out / name).iterdir() if path.is_dir()]
        assert weights == []  # of hundreds of runs they would fill the disk
        lines = (out / name / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(12))
        assert all("eval/accuracy" in json.loads(line) for line in lines)
        assert not (out / name / "report.html").exists()
    rates = [load(out / name / "config.toml").update.lr for name in names]
    assert rates == [1e-4, 1e-4, 1e-2, 1e-2]
    logs = [(out / "logs" / f"{name}.log").read_text() for name in names]
    assert ["warm start 2/2" in log for log in logs] == [True, False, False, False], "all share the first one's"


def test_the_files_have_every_runs_figures_and_the_command(
    stressed: tuple[Path, list[object], Result], recipe: str
) -> None:
    out, _, result = stressed
    command = f"trimtab stress grpo 'sspo + s2t' --axis update.lr=1e-4,1e-2 --seeds 1 --recipe {recipe} --out {out}"
    markdown = (out / "stress.md").read_text()
    assert command in markdown and "| objective | margin |" in markdown and "| objective | 1e-4 | 1e-2 |" in markdown
    assert markdown.strip() in result.output
    stored = json.loads((out / "stress.json").read_text(), parse_constant=pytest.fail)
    assert (stored["recipe"], stored["objectives"]) == (recipe, ["grpo", "sspo + s2t"])
    assert [(axis["key"], axis["values"]) for axis in stored["axes"]] == [("update.lr", ["1e-4", "1e-2"])]
    for run in stored["runs"]:
        assert (run["state"], run["seed"], run["steps"], run["axis"]) == ("finished", 0, 11, "update.lr")
        assert [step for step, _ in run["curves"]["eval/accuracy"]] == list(range(12))
        assert run["entropy_end"] > 0 and run["seconds"] > 0
    assert [run.folder for table in read_stress(out).tables for run in table.runs] == list(figures(out))


def test_it_ends_with_a_report_and_trimtab_report_makes_the_same(
    stressed: tuple[Path, list[object], Result], tmp_path: Path
) -> None:
    out, _, result = stressed
    page = (out / "report.html").read_text()
    assert f"written: {out / 'report.html'}" in result.output
    assert data_of(page)["stress"]["objectives"] == ["grpo", "sspo + s2t"]
    assert trimtab("report", out, "--out", tmp_path / "again.html").exit_code == 0
    assert (tmp_path / "again.html").read_text() == page


def test_a_second_time_nothing_is_run_and_more_values_run_only_what_is_new(
    stressed: tuple[Path, list[object], Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, words, _ = stressed
    run_in_this_process(monkeypatch)
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/metrics.jsonl")}
    again = trimtab(*words)
    assert again.exit_code == 0 and ": starts" not in again.output and ": resumes" not in again.output
    assert "4 of 4 runs have ended before" in again.output
    words = ["update.lr=1e-4,1e-3,1e-2" if word == LR else word for word in words]
    more = trimtab(*words)
    assert more.exit_code == 0 and more.output.count(": starts") == 2
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(figures(out)) == 6


# Runs that only pretend to train: their files are written as they start.

STEPS = 60
Script = Callable[[GridRun], list[str]]
WAIT = "cat > /dev/null"  # until the input ends, which stops a run


def metrics(run: GridRun, accuracy: Callable[[int], float], last: int) -> None:
    """Write a run's files up to a step."""
    run.folder.path.mkdir(parents=True, exist_ok=True)
    run.folder.config.write_text(resolved_toml(run.config))
    run.folder.metrics.unlink(missing_ok=True)
    for step in range(last + 1):
        run.folder.append_metrics({"step": step, "eval/accuracy": accuracy(step), "policy/entropy": 0.5})


def learns(run: GridRun) -> list[str]:
    metrics(run, lambda step: 0.4 + step / 1000, STEPS)
    (run.folder.path / "model").mkdir(exist_ok=True)
    return ["true"]


def collapses(run: GridRun) -> list[str]:
    metrics(run, lambda step: 0.4 if step < 5 else 0.0, 25)
    return ["sh", "-c", f"{WAIT}; exit 3"]


def comes_back(run: GridRun) -> list[str]:
    metrics(run, lambda step: 0.4 if step < 5 else 0.0, 25)
    line = json.dumps({"step": 26, "eval/accuracy": 0.4})
    return ["sh", "-c", f"{WAIT}; echo '{line}' >> '{run.folder.metrics}'; exit 3"]


def goes_on(run: GridRun) -> list[str]:
    metrics(run, lambda step: 0.4, 7)
    return ["sh", "-c", f"{WAIT}; exit 3"]


def fails(run: GridRun) -> list[str]:
    return ["sh", "-c", "echo 'trimtab: out of memory' >&2; exit 2"]


@dataclass
class Pretended:
    """Runs by objective and learning rate; `started` lists the runs that were started, in order."""

    recipe: str
    out: Path
    scripts: Callable[[str, float], Script]
    started: list[str] = field(default_factory=list)

    def command(self, run: GridRun) -> list[str]:
        self.started.append(run.name)
        return self.scripts(run.objective, run.config.update.lr)(run)

    def stress(self, *words: object, axis: str = LR) -> Result:
        settings = ["--set", f"run.steps={STEPS}", "--set", "warm_start.steps=0"]
        self.started.clear()
        words = ("grpo", "dapo", "--axis", axis, "--seeds", 1, "--jobs", 2, *words)
        return trimtab("stress", *words, "--recipe", self.recipe, "--out", self.out, *settings)


@pytest.fixture
def pretended(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pretended:
    made = Pretended(recipe, tmp_path / "out", lambda objective, lr: learns)

    def command(run: GridRun) -> list[str]:  # a function, since a bound method would not get the run
        return made.command(run)

    monkeypatch.setattr(GridRun, "command", command)
    return made


def test_a_run_that_has_collapsed_is_ended_early_counted_as_such_and_not_resumed(pretended: Pretended) -> None:
    pretended.scripts = lambda objective, lr: collapses if (objective, lr) == ("grpo", 1e-2) else learns
    result = pretended.stress()
    assert result.exit_code == 0, result.output
    assert "update.lr was pushed from 1e-4 to 1e-2: dapo held longest, up to 1e-2; grpo up to 1e-4." in result.output
    run = figures(pretended.out)["grpo-update.lr=1e-2-seed0"]
    assert (run["survived"], run["collapse_step"], run["steps"], run["state"]) == (False, 5, 25, "stopped")
    assert run["end"] == "collapsed at step 5: accuracy is 0.00; its best was 0.40"
    assert "| grpo | 1/1 46.0% | 0/1 0% |" in (pretended.out / "stress.md").read_text()
    stored = (pretended.out / "stress.json").read_text()
    assert pretended.stress().exit_code == 0
    assert pretended.started == []
    assert (pretended.out / "stress.json").read_text() == stored


def falls_late(run: GridRun) -> list[str]:
    metrics(run, lambda step: 0.5 if step < STEPS - 3 else 0.0, STEPS)
    return ["true"]


def ends_early(run: GridRun) -> list[str]:
    metrics(run, lambda step: 0.5, 8)
    return ["sh", "-c", "echo 'trimtab: stopped after step 8: an alarm' >&2; exit 3"]


def test_a_run_that_ends_below_half_of_its_best_does_not_survive(pretended: Pretended) -> None:
    pretended.scripts = lambda objective, lr: falls_late if (objective, lr) == ("grpo", 1e-2) else learns
    result = pretended.stress()
    assert result.exit_code == 0, result.output
    run = figures(pretended.out)["grpo-update.lr=1e-2-seed0"]
    assert (run["survived"], run["collapse_step"]) == (False, None)
    assert run["end"].startswith("fell at step 57 to below 50% of its best") and run["steps"] == STEPS
    assert "dapo held longest, up to 1e-2; grpo up to 1e-4." in result.output
    assert "1 of 1 ended below half of their best" in (pretended.out / "report.html").read_text()


def test_a_run_that_ends_too_early_to_be_judged_has_no_verdict(pretended: Pretended) -> None:
    pretended.scripts = lambda objective, lr: ends_early if (objective, lr) == ("grpo", 1e-2) else learns
    result = pretended.stress()
    run = figures(pretended.out)["grpo-update.lr=1e-2-seed0"]
    assert (result.exit_code, run["survived"]) == (3, None)
    assert run["end"] == "too short to be judged: 8 steps, and a collapse lasts 10 or more"
    assert run["end"] in result.output


def gets_better_numbers(run: GridRun) -> list[str]:
    metrics(run, lambda step: 0.0, STEPS)
    for step in range(STEPS + 1):
        run.folder.append_metrics({"step": step, "eval/score": 0.05 + step / 100})
    (run.folder.path / "model").mkdir(exist_ok=True)
    return ["true"]


def test_a_run_whose_rule_gives_numbers_is_judged_by_them_and_shows_them(pretended: Pretended) -> None:
    pretended.scripts = lambda objective, lr: gets_better_numbers if objective == "grpo" else learns
    result = pretended.stress()
    assert result.exit_code == 0, result.output
    run = figures(pretended.out)["grpo-update.lr=1e-2-seed0"]
    assert (run["survived"], run["accuracy_end"], run["score_end"]) == (True, 0.0, 0.65)
    stored = (pretended.out / "stress.md").read_text()
    assert "| grpo | 1/1 0%, score 0.650 | 1/1 0%, score 0.650 |" in stored
    assert "| dapo | 1/1 46.0% | 1/1 46.0% |" in stored
    assert "Held-out score" in (pretended.out / "report.html").read_text()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"state": "unfinished", "why": "", "steps": 60}', '{"state": []}'])
def test_a_damaged_note_of_a_runs_end_is_named(pretended: Pretended, text: str) -> None:
    assert pretended.stress().exit_code == 0
    path = pretended.out / "dapo-update.lr=1e-2-seed0" / "ended.json"
    path.write_text(text)
    result = pretended.stress()
    assert result.exit_code == 2 and f"{path} does not say how the run ended" in result.stderr


def test_a_run_that_comes_back_while_it_is_being_stopped_has_no_verdict_and_is_resumed(pretended: Pretended) -> None:
    pretended.scripts = lambda objective, lr: comes_back if (objective, lr) == ("grpo", 1e-2) else learns
    result = pretended.stress()
    run = figures(pretended.out)["grpo-update.lr=1e-2-seed0"]
    assert (result.exit_code, run["survived"]) == (3, None)
    assert "came back in step 26" in run["end"] and run["end"] in result.output
    pretended.scripts = lambda objective, lr: learns
    assert pretended.stress().exit_code == 0
    assert pretended.started == ["grpo-update.lr=1e-2-seed0"]
    assert figures(pretended.out)["grpo-update.lr=1e-2-seed0"]["survived"] is True


def test_a_run_that_fails_is_named_and_does_not_stop_the_others(pretended: Pretended) -> None:
    pretended.scripts = lambda objective, lr: fails if (objective, lr) == ("grpo", 1e-4) else learns
    result = pretended.stress()
    assert result.exit_code == 3
    runs = figures(pretended.out)
    assert [run["survived"] for run in runs.values()] == [None, True, True, True]
    assert "- grpo-update.lr=1e-4-seed0: failed: out of memory" in (pretended.out / "stress.md").read_text()
    shown = data_of((pretended.out / "report.html").read_text())["stress"]
    assert shown["missing"] == ["grpo-update.lr=1e-4-seed0: failed: out of memory"]
    pretended.scripts = lambda objective, lr: learns
    assert pretended.stress().exit_code == 0
    assert pretended.started == ["grpo-update.lr=1e-4-seed0"]


def test_if_all_runs_fail_there_are_tables_but_no_report(pretended: Pretended) -> None:
    pretended.scripts = lambda objective, lr: fails
    assert pretended.stress().exit_code == 3
    assert "no run has finished yet" in (pretended.out / "stress.md").read_text()
    assert not (pretended.out / "report.html").exists()


@contextmanager
def interrupting(runs: list[GridRun], console: Console) -> Iterator[Any]:
    """Press Ctrl-C once two runs are running."""
    left = [signal.SIGINT]

    def watch(running: list[GridRun], outcomes: list[Any]) -> None:
        if len(running) == 2 and left:
            signal.raise_signal(left.pop())

    yield watch


def test_a_stopped_test_resumes_what_it_had_begun(pretended: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    pretended.scripts = lambda objective, lr: goes_on
    with monkeypatch.context() as patch:
        patch.setattr("trimtab.experiments.grid.command.progress_bars", interrupting)
        result = pretended.stress()
    assert result.exit_code == 3 and "the same command resumes the stress test" in result.output
    ends = [run["end"] for run in figures(pretended.out).values()]
    assert ends == ["unfinished: interrupted"] * 2 + ["unfinished: not run: interrupted"] * 2
    pretended.scripts = lambda objective, lr: learns
    again = pretended.stress()
    assert again.exit_code == 0 and again.output.count(": resumes") == 2 and again.output.count(": starts") == 2
    assert all(run["survived"] for run in figures(pretended.out).values())


def test_a_search_doubles_until_runs_break_and_then_bisects(pretended: Pretended) -> None:
    limits = {"grpo": 2e-4, "dapo": 1e-3}
    pretended.scripts = lambda objective, lr: learns if lr <= limits[objective] else collapses
    result = pretended.stress("--search", axis="update.lr=1e-4,1e-3")
    assert result.exit_code == 0, result.output
    rates = {name: [run.split("lr=")[1].removesuffix("-seed0") for run in pretended.started if run.startswith(name)]
             for name in limits}  # fmt: skip
    assert rates == {
        "grpo": ["1e-4", "0.0002", "0.0004", "0.00028"],
        "dapo": ["1e-4", "0.0002", "0.0004", "0.0008", "1e-3"],
    }
    (axis,) = json.loads((pretended.out / "stress.json").read_text())["axes"]
    assert axis["values"] == ["1e-4", "0.0002", "0.00028", "0.0004", "0.0008", "1e-3"]
    assert {name: margin["value"] for name, margin in axis["margins"].items()} == {"grpo": "0.0002", "dapo": "1e-3"}
    assert axis["stable"] == "0.0002"
    assert pretended.stress("--search", axis="update.lr=1e-4,1e-3").exit_code == 0
    assert pretended.started == []


def test_a_search_goes_on_for_the_others_if_one_fails(pretended: Pretended) -> None:
    pretended.scripts = lambda objective, lr: fails if objective == "grpo" else learns
    assert pretended.stress("--search", axis="update.lr=1e-4,3e-4").exit_code == 3
    assert len([name for name in pretended.started if name.startswith("grpo")]) == 1
    assert len([name for name in pretended.started if name.startswith("dapo")]) == 3


# Mistakes.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["grpo", "grpoo", "--axis", "update.lr=1e-4"], "did you mean grpo"),
        (["grpo", "grpo", "--axis", "update.lr=1e-4"], "given twice"),
        (["grpo", "--axis", "update.lrr=1e-4"], "did you mean lr"),
        (["grpo", "--axis", "update.lr=1e-4,1e-2,1e-3"], "give the values in the order"),
        (["grpo", "--axis", "update.lr=-1,1e-4"], "update.lr"),
        (["grpo", "--axis", "update.lr=1e-3,0.001"], "1e-3 is given twice"),
        (["grpo", "--axis", "update.lr=1e-4", "--axis", "update.lr=1e-3"], "--axis update.lr is given twice"),
        (["grpo", "--axis", "update.lr=1e-4", "--set", "update.lr=1e-3"], "leave one of them out"),
        (["grpo", "--axis", "run.seed=1,2"], "their number is --seeds"),
        (["grpo", "--axis", "objective.name=dapo,gspo"], "objectives are named as arguments"),
        (["grpo", "--axis", "update.lr=1e-4", "--set", "objective.name=dapo"], "objectives are named as arguments"),
        (["grpo", "--axis", "model.attention=" + "x" * 300], "too long for the name of a folder"),
        (["grpo", "--axis", "update.lr"], "write section.key=value"),
        (["grpo", "--axis", "update.lr=1e-4", "--search"], "give two positive numbers"),
        (["grpo", "--axis", "rollout.temperature=1,1e9", "--search"], "rollout.temperature"),
        (
            ["grpo", "--axis", "update.lr=1e-4", "--set", "run.steps=10"],
            "run.steps = 10 is too short for a stress test",
        ),
        (["grpo", "--axis", "run.steps=60,9"], "run.steps = 9 is too short for a stress test"),
        (["grpo", "--axis", "update.lr=1e-4", "--seeds", "0"], "at least 1"),
        (["grpo", "--axis", "update.lr=1e-4", "--seeds", "10001"], "runs at most"),
        (["grpo", "--axis", "update.lr=1e-4", "--recipe", "nowhere"], "unknown recipe"),
    ],
)
def test_mistakes_are_found_before_the_first_run_and_nothing_is_made(
    pretended: Pretended, arguments: list[str], message: str
) -> None:
    recipe = [] if "--recipe" in arguments else ["--recipe", pretended.recipe]
    result = trimtab("stress", *arguments, *recipe, "--out", pretended.out)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert pretended.started == [] and not pretended.out.exists()


def test_a_second_test_in_the_same_folder_is_refused(pretended: Pretended) -> None:
    with locked(pretended.out):
        result = pretended.stress()
    assert result.exit_code == 2 and "is in use by another process" in result.stderr
    assert pretended.started == []


# Names that mean something to a shell, a path, Markdown, JSON or rich.

HOSTILE_VALUES = [
    "../../up",
    "/root",
    "a|b",
    "[/red]",
    "[bold]",
    "<script>",
    "$(x)",
    '"runs"',
    "RUNS",
    "`",
    "\u202eabc",
]


def test_hostile_values_stay_text_everywhere(pretended: Pretended) -> None:
    pretended.scripts = lambda objective, lr: learns
    result = pretended.stress(axis=f"model.attention={','.join(HOSTILE_VALUES)}")
    assert result.exit_code == 0, result.output
    runs = figures(pretended.out)
    assert len(runs) == 2 * len(HOSTILE_VALUES)
    assert {path.parent.name for path in pretended.out.glob("*/metrics.jsonl")} == set(runs)
    assert list(dict.fromkeys(run["value"] for run in runs.values())) == HOSTILE_VALUES
    lines = (pretended.out / "stress.md").read_text().splitlines()
    grid = lines[lines.index("Seeds that survive, and mean accuracy at the end:") + 2 :]
    assert [line.replace("\\|", "").count("|") for line in grid[:4]] == [len(HOSTILE_VALUES) + 2] * 4
    console = Console(force_terminal=True, width=300, record=True)
    console.print(as_table(read_stress(pretended.out).tables))
    shown = console.export_text()
    assert all(value in shown for value in HOSTILE_VALUES if value.isascii())


def test_a_terminal_breaks_the_legend_between_words(pretended: Pretended) -> None:
    settings = (f"run.steps={STEPS}", "warm_start.steps=0")
    test = Grid(("grpo", "dapo"), pretended.out, pretended.recipe, 1, settings, axes=(parse_axis(LR),))
    console = Console(force_terminal=True, width=60, record=True)
    assert show_grid(test, console) == 0
    legend = console.export_text().partition("Margin: the")[2].partition("or clipped.")[0].splitlines()
    assert len(legend) > 4 and all(len(line) <= 60 for line in legend)


def test_a_recipe_of_any_name_gives_a_file_that_can_be_read(pretended: Pretended, tmp_path: Path) -> None:
    recipe = tmp_path / '"RUNS".toml'
    recipe.write_text(RECIPE)
    pretended.recipe = str(recipe)
    assert pretended.stress().exit_code == 0
    assert read_stress(pretended.out).recipe == str(recipe)
