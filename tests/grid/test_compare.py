"""`trimtab compare` runs every objective with every seed once, whatever happens to single runs."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from helpers.own_process import Terminal, exit_code, in_own_process, run_command, wait_until
from trimtab.cli import app
from trimtab.experiments.grid import Grid, GridRun, ProcessPool, RunOutcome
from trimtab.experiments.grid.comparison import as_json, as_markdown, as_table, differences, make_rows, sparklines
from trimtab.experiments.grid.pool import Watch
from trimtab.files import locked, mark_folder
from trimtab.text import BARS
from trimtab.trainer.train import STOPPED, resolved_toml

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
steps = 3
eval_every = 3
eval_problems = 4
threads = 1
device = "cpu"
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("recipe") / "tiny.toml"
    path.write_text(RECIPE)
    return str(path)


def comparison(recipe: str, out: Path, *objectives: str, **options: Any) -> Grid:
    return Grid(objectives, out, recipe, **options)


def compare(*words: str) -> Any:
    result = CliRunner().invoke(app, ["compare", *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


# The real thing: processes that train. In a folder that a comparison made, a file blocks one run, which fails.


@pytest.fixture(scope="module")
def compared(recipe: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    out = tmp_path_factory.mktemp("compared")
    mark_folder(out, "compare")
    (out / "sspo+s2t-seed0").write_text("in the way")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIMTAB_WARM_START", str(out / ".warm_start"))
        return out, compare("stapo", "sspo + s2t", "--recipe", recipe, "--seeds", "1", "--out", str(out))


def test_a_failing_run_is_reported_and_does_not_stop_the_others(compared: tuple[Path, Any]) -> None:
    out, result = compared
    table = json.loads((out / "compare.json").read_text())["objectives"]
    assert result.exit_code == 3
    assert [table[name]["runs"][0]["state"] for name in table] == ["finished", "failed"]
    assert "sspo+s2t-seed0 is a file" in table["sspo + s2t"]["runs"][0]["why"]
    assert "sspo + s2t, seed 0: failed: " in result.output
    assert table["sspo + s2t"]["mean"]["accuracy_end"] is None


def test_tables_and_files_have_the_numbers_and_the_command(compared: tuple[Path, Any], recipe: str) -> None:
    out, result = compared
    markdown = (out / "compare.md").read_text()
    assert f"trimtab compare stapo 'sspo + s2t' --seeds 1 --recipe {recipe} --out {out}\n" in markdown
    for name in ("| stapo | 1/1 |", "| sspo + s2t | 0/1 |"):
        assert name in markdown
        assert name in result.output
    numbers = json.loads((out / "compare.json").read_text())["objectives"]["stapo"]
    assert numbers["mean"]["entropy_end"] > 0
    assert list(numbers["curves"]["held-out accuracy"]) == ["0", "3"]


def test_a_second_time_only_what_is_missing_is_run_and_shares_the_warm_start(
    compared: tuple[Path, Any], recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "again"
    shutil.copytree(compared[0], out)
    monkeypatch.setenv("TRIMTAB_WARM_START", str(out / ".warm_start"))
    (out / "sspo+s2t-seed0").unlink()
    before = (out / "stapo-seed0/metrics.jsonl").stat().st_mtime_ns
    result = compare("stapo", "sspo + s2t", "--recipe", recipe, "--seeds", "1", "--out", str(out))
    assert result.exit_code == 0
    assert (out / "stapo-seed0/metrics.jsonl").stat().st_mtime_ns == before
    assert "stapo-seed0: finished, already before" in result.output
    assert "sspo+s2t-seed0: starts" in result.output
    assert "| sspo + s2t | 1/1 |" in result.output
    assert "warm start 2/2" in (out / "logs/stapo-seed0.log").read_text()
    assert "warm start 2/2" not in (out / "logs/sspo+s2t-seed0.log").read_text()
    assert f"written: {out / 'report.html'}" in result.output
    page = (out / "report.html").read_text()
    assert "stapo-seed0" in page
    assert "sspo+s2t-seed0" in page


def test_an_unfinished_run_is_resumed(recipe: str, tmp_path: Path) -> None:
    (run,) = comparison(recipe, tmp_path, "stapo", seeds=1).plan()
    assert (run.state(), run.command()[-2:]) == ("new", ["--out", str(run.folder.path)])
    ended(run, [0.1, 0.4], [1.0])
    assert (run.state(), run.command()[-2:]) == ("unfinished", ["--resume", str(run.folder.path)])
    run.folder.append_metrics({"step": 3})
    assert run.state() == "unfinished"  # its model is not there yet
    (run.folder.path / "model").mkdir()
    assert run.state() == "finished"
    with run.folder.metrics.open("a") as file:
        file.write('{"step": 4, "torn')
    assert run.last_step() == 3


def test_a_folder_of_another_recipe_is_refused(compared: tuple[Path, Any], recipe: str) -> None:
    out, _ = compared
    result = compare("stapo", "--recipe", recipe, "--seeds", "1", "--out", str(out), "--set", "update.lr=0.5")
    assert result.exit_code == 2
    assert "holds a run of another recipe" in result.stderr
    assert "update.lr: 0.001 -> 0.5" in result.stderr
    fewer = compare("stapo", "--recipe", recipe, "--seeds", "1", "--out", str(out), "--set", "run.steps=2")
    assert "3 are done already, 2 are asked for" in fewer.stderr


def test_an_unknown_objective_is_named_before_a_folder_of_another_recipe(
    compared: tuple[Path, Any], recipe: str
) -> None:
    out, _ = compared
    result = compare("stapo", "nosuch", "--recipe", recipe, "--out", str(out), "--set", "update.lr=0.5")
    assert result.exit_code == 2
    assert "nosuch" in result.stderr and "holds a run of another recipe" not in result.stderr


# Before anything runs.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stapo", "grpoo"], "did you mean grpo"),
        (["sspo+s2t", "sspo + s2t"], "given twice"),
        (["stapo", "--seeds", "0"], "at least 1"),
        (["stapo", "--set", "run.stepps=1"], "did you mean steps"),
        (["stapo", "--recipe", "nowhere"], "unknown recipe"),
    ],
)
def test_mistakes_are_found_before_the_first_run(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = compare(*arguments, "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_second_comparison_in_the_same_folder_is_refused_and_touches_nothing(recipe: str, tmp_path: Path) -> None:
    with locked(tmp_path / "out"):
        result = compare("stapo", "--recipe", recipe, "--seeds", "1", "--out", str(tmp_path / "out"))
    assert result.exit_code == 2 and "is in use by another process" in result.stderr
    assert not list((tmp_path / "out").iterdir())


def test_every_objective_runs_with_every_seed_and_every_setting(recipe: str, tmp_path: Path) -> None:
    settings = ("run.seed=7", "objective.scope=micro", "update.lr=0.5")
    runs = comparison(recipe, tmp_path, "stapo", "sspo + s2t", seeds=2, settings=settings).plan()
    assert [run.name for run in runs] == ["stapo-seed7", "stapo-seed8", "sspo+s2t-seed7", "sspo+s2t-seed8"]
    assert [run.config.run.seed for run in runs] == [7, 8, 7, 8]
    assert {run.config.build_objective().scope for run in runs} == {"micro"}
    assert runs[3].config.build_objective().name == "sspo + s2t"
    assert len({run.folder.path.parent for run in runs}) == 1


# The processes, which here only pretend to train.


def pool(recipe: str, out: Path, monkeypatch: pytest.MonkeyPatch, code: str, **options: Any) -> ProcessPool:
    """Runs that execute a line of Python; `folder` in it is the run's folder."""

    def command(run: GridRun) -> list[str]:
        head = f"import os, signal, sys, time, pathlib; folder = pathlib.Path({str(run.folder.path)!r}); "
        return [sys.executable, "-c", head + code.replace("OBJECTIVE", repr(run.objective))]

    monkeypatch.setattr(GridRun, "command", command)
    asked = comparison(recipe, out, "stapo", "grpo", seeds=2, **options)
    lines: list[str] = []
    return ProcessPool(asked.plan(), asked.jobs, lines.append)


# A run that ends once so many runs have started; if they never do, it fails after a minute.
UNTIL_STARTED = (
    "folder.with_suffix('.started').touch(); "
    "codes = (time.sleep(0.02) or (0 if len(list(folder.parent.glob('*.started'))) >= COUNT else None) "
    "for _ in range(3000)); "
    "sys.exit(next((code for code in codes if code is not None), 1))"
)
WARM = "(folder / 'checkpoints/step-0').mkdir(parents=True); "


def most_at_once(processes: ProcessPool) -> int:
    """Run them all; return how many there were at one time."""
    counts: list[int] = []
    processes.watch = lambda running, outcomes: counts.append(len(running))
    assert {outcome.state for outcome in processes.run()} == {"finished"}
    return max(counts)


@pytest.mark.parametrize("jobs", [1, 2, 4])
def test_as_many_run_at_a_time_as_jobs_says(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    code = UNTIL_STARTED.replace("COUNT", str(jobs))
    assert most_at_once(pool(recipe, tmp_path, monkeypatch, code, jobs=jobs, settings=("warm_start.steps=0",))) == jobs


def test_the_second_run_of_a_seed_waits_for_the_first_ones_warm_start(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = UNTIL_STARTED.replace("COUNT", "2")
    assert most_at_once(pool(recipe, tmp_path, monkeypatch, code, jobs=4)) == 2  # one for each seed


def test_it_waits_no_longer_than_the_warm_start(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = WARM + UNTIL_STARTED.replace("COUNT", "4")
    assert most_at_once(pool(recipe, tmp_path, monkeypatch, code, jobs=4)) == 4


def test_a_failure_has_the_error_of_its_log(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "os.kill(os.getpid(), 9) if OBJECTIVE == 'grpo' else "
        "sys.exit(sys.stderr.write('noise\\ntrimtab: no \\x1b[31mgood\\n  at all\\n\\nmore') and 2)"
    )
    outcomes = pool(recipe, tmp_path, monkeypatch, code, jobs=4, settings=("warm_start.steps=0",)).run()
    assert [outcome.state for outcome in outcomes] == ["failed"] * 4
    assert outcomes[0].why == "no \\x1b[31mgood; at all"
    assert outcomes[2].why == "killed by SIGKILL"


# A run that goes on until its input ends, and then stops as training does.
LONG = (
    "folder.mkdir(); folder.joinpath('ready').touch(); sys.stdin.read(); folder.joinpath('saved').touch(); sys.exit(3)"
)


@pytest.fixture
def handlers() -> Iterator[None]:
    """None of the signals is ignored (Ctrl-C is where the tests run in the background), and all are restored."""
    usual = dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), signal.default_int_handler)
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    assert {number: signal.getsignal(number) for number in usual} == usual
    for number, handler in before.items():
        signal.signal(number, handler)


def signal_when(out: Path, *numbers: int, files: str = "*/ready", count: int = 2) -> Watch:
    """Raise these signals in this process, once, as soon as so many of these files are there."""
    left = list(numbers)

    def watch(running: list[GridRun], outcomes: list[RunOutcome]) -> None:
        while left and len(list(out.glob(files))) >= count:
            signal.raise_signal(left.pop(0))

    return watch


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_lets_the_runs_finish_their_step(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    processes = pool(recipe, tmp_path, monkeypatch, LONG, jobs=2)
    processes.watch = signal_when(tmp_path, number)
    outcomes = processes.run()
    assert processes.stop_request.number == number
    assert len(list(tmp_path.glob("*/saved"))) == 2
    assert [outcome.why for outcome in outcomes] == ["interrupted"] * 2 + ["not run: interrupted"] * 2
    assert not any(outcome.counts for outcome in outcomes)


def test_after_an_error_of_the_comparison_its_runs_stop_well(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = pool(recipe, tmp_path, monkeypatch, LONG, jobs=2)

    def fail(running: list[GridRun], outcomes: list[RunOutcome]) -> None:
        if len(list(tmp_path.glob("*/ready"))) == 2:
            raise OSError("no space left on device")

    processes.watch = fail
    with pytest.raises(OSError, match="no space"):
        processes.run()
    assert len(list(tmp_path.glob("*/saved"))) == 2


def run_pool(recipe: str, out: Path) -> None:
    """Run a comparison of long runs; in a process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        pool(recipe, out, patch, LONG, jobs=2).run()


def compare_in_terminal(recipe: str, out: Path, terminal: str) -> None:
    """Run the command for a comparison of long runs; in a process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        pool(recipe, out, patch, LONG, jobs=2)
        words = ["stapo", "grpo", "--seeds", "2", "--jobs", "2", "--recipe", recipe, "--out", str(out)]
        run_command(["compare", *words], terminal, out)


@pytest.mark.slow
def test_runs_get_to_their_checkpoint_after_the_terminal_was_closed(recipe: str, tmp_path: Path) -> None:
    terminal = Terminal()
    process = in_own_process(compare_in_terminal, recipe, tmp_path, terminal.path)
    wait_until(lambda: len(list(tmp_path.glob("*/ready"))) == 2, process)
    terminal.close()
    assert exit_code(process) == STOPPED
    assert len(list(tmp_path.glob("*/saved"))) == 2
    assert (tmp_path / "compare.md").exists()


def test_runs_stop_as_usual_when_the_comparison_is_killed(recipe: str, tmp_path: Path) -> None:
    process = in_own_process(run_pool, recipe, tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("*/ready"))) == 2, process)
    process.kill()
    wait_until(lambda: len(list(tmp_path.glob("*/saved"))) == 2)


@pytest.mark.usefixtures("handlers")
def test_a_second_ctrl_c_stops_at_once(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stubborn = LONG.replace("sys.exit(3)", "sys.exit(3) if OBJECTIVE == 'stapo' else time.sleep(600)")
    processes = pool(recipe, tmp_path, monkeypatch, stubborn, jobs=4, settings=("warm_start.steps=0",))
    first = signal_when(tmp_path, signal.SIGINT, count=4)
    second = signal_when(tmp_path, signal.SIGINT, files="*/saved", count=4)
    processes.watch = lambda running, outcomes: (first(running, outcomes), second(running, outcomes))
    outcomes = processes.run()
    assert [outcome.run.name for outcome in outcomes] == [run.name for run in processes.runs]  # each once
    assert [outcome.why for outcome in outcomes[2:]] == ["stopped at once"] * 2


@pytest.mark.usefixtures("handlers")
def test_a_run_that_starts_while_ctrl_c_is_pressed_is_not_lost(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(*args, **kwargs))
        signal.raise_signal(signal.SIGINT)
        return started[-1]

    processes = pool(recipe, tmp_path, monkeypatch, LONG, jobs=2)
    with monkeypatch.context() as patched:
        popen = SimpleNamespace(PIPE=subprocess.PIPE, Popen=start)
        patched.setattr("trimtab.experiments.grid.pool.subprocess", popen)
        outcomes = processes.run()
    assert [process.poll() is not None for process in started] == [True]  # and no other was started
    assert [outcome.why for outcome in outcomes] == ["interrupted"] + ["not run: interrupted"] * 3


@pytest.mark.usefixtures("handlers")
def test_an_ignored_ctrl_c_stays_ignored_but_the_runs_can_be_stopped_all_the_same(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a script's background, or under nohup."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    processes = pool(recipe, tmp_path, monkeypatch, LONG, jobs=2)
    processes.watch = signal_when(tmp_path, signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
    outcomes = processes.run()
    assert processes.stop_request.number == signal.SIGTERM
    assert [outcome.why for outcome in outcomes] == ["interrupted"] * 2 + ["not run: interrupted"] * 2
    assert [signal.signal(number, handler) for number, handler in before.items()] == [signal.SIG_IGN] * 2


# Numbers.


def ended(run: GridRun, accuracy: list[float], entropy: list[float], state: Any = "finished") -> RunOutcome:
    """Make a run's folder with these numbers in it."""
    run.folder.path.mkdir(parents=True)
    (run.folder.path / "config.toml").write_text(resolved_toml(run.config))
    run.folder.append_metrics({"step": 0, "eval/accuracy": accuracy[0]})
    for step, (right, open_) in enumerate(zip(accuracy[1:], entropy, strict=True), start=1):
        run.folder.append_metrics(
            {"step": step, "eval/accuracy": right, "policy/entropy": open_, "s2t/entropy_threshold": float("nan")}
        )
    return RunOutcome(run, state)


def test_means_and_spreads_are_over_seeds(recipe: str, tmp_path: Path) -> None:
    asked = comparison(recipe, tmp_path, "stapo", "grpo", seeds=2)
    one, two, three, four = asked.plan()
    rows = make_rows(
        [
            ended(one, [0.1, 0.4], [1.0]),
            ended(two, [0.1, 0.6], [2.0], "stopped"),  # counts with what it reached
            ended(three, [0.1, 0.9], [0.0]),
            ended(four, [0.1, 0.0], [9.0], "failed"),  # does not
        ]
    )
    stapo, grpo = rows
    assert stapo.mean["accuracy_end"] == pytest.approx(0.5)
    assert stapo.spread["accuracy_end"] == pytest.approx(0.1 * 2**0.5)
    assert stapo.mean["entropy_end"] == pytest.approx(1.5)
    assert (grpo.mean["accuracy_end"], grpo.spread["accuracy_end"], grpo.cells()[1]) == (0.9, None, "1/2")
    markdown = as_markdown(asked, rows)
    assert "| stapo | 2/2 | 10.0% ± 0% | 50.0% ± 14.1% |" in markdown
    assert "| grpo | 1/2 | 10.0% | 90.0% |" in markdown
    assert (
        json.loads(as_json(asked, rows), parse_constant=pytest.fail)["objectives"]["grpo"]["spread"]["clipped"] is None
    )


def test_objectives_are_compared_with_the_first_seed_by_seed(recipe: str, tmp_path: Path) -> None:
    asked = comparison(recipe, tmp_path, "stapo", "grpo", seeds=3)
    ours, theirs = [0.5, 0.6, 0.7], [0.4, 0.4, 0.4]
    made = zip(asked.plan(), [*theirs, *ours], strict=True)
    rows = make_rows([ended(run, [0.1, right], [1.0], "failed" if right == 0.7 else "finished") for run, right in made])
    found = differences(rows)["grpo"]["accuracy_end"]
    assert (found.mean, found.pairs, found.agree, found.unpaired) == (pytest.approx(0.15), 2, 2, 1)
    assert found.high - found.mean == pytest.approx(12.706 * 0.05, rel=1e-3), "Student's t of two pairs"
    markdown = as_markdown(asked, rows)
    assert "Differences to stapo, paired by seed:" in markdown
    assert "| grpo | held-out, points | +15.0 | -48.5 to +78.5 | 2 of 2, 1 unpaired |" in markdown
    stored = json.loads(as_json(asked, rows))["objectives"]
    assert stored["grpo"]["differences"]["accuracy_end"]["mean"] == pytest.approx(0.15)
    assert stored["stapo"]["differences"] == {}
    asked = comparison(recipe, tmp_path / "1", "stapo", "grpo", seeds=1)
    one = make_rows([ended(run, [0.1, 0.5], [1.0]) for run in asked.plan()])
    assert "| +0.0 | - | 0 of 1 |" in as_markdown(asked, one)


def test_the_tables_fit_a_terminal_of_80_columns(recipe: str, tmp_path: Path) -> None:
    names = "stapo + stare(adaptive=true)", "sspo + trim(floor=0.25)"
    runs = comparison(recipe, tmp_path, *names, seeds=3).plan()
    outcomes = [ended(run, [0.123, 0.5 + n / 100, 0.6], [1.23, 0.5 + n]) for n, run in enumerate(runs)]
    for outcome in outcomes:
        outcome.run.folder.append_metrics({"step": 3, "eval/score": -12.5, "tokens/silenced_share": 0.000123,
            "reward/mean": -10.5, "update/clip_share": 0.123, "time/update": 12_345.6})  # fmt: skip
        outcome.run.folder.append_metrics({"step": 0, "eval/score": -25.125})
    file = StringIO()
    Console(file=file, width=80, force_terminal=True, color_system=None).print(as_table(make_rows(outcomes), BARS))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in file.getvalue() and "..." not in file.getvalue(), "nothing is cut off"
    for figure in ("12.3±0%", "60.0±0%", "-25.125±0.000", "-12.500±0.000", "-10.500±0.000", "12345.6±0.0", "0.012±0%"):
        assert any(figure in line for line in lines), figure


def test_scores_are_compared_where_rules_give_them(recipe: str, tmp_path: Path) -> None:
    asked = comparison(recipe, tmp_path, "stapo", "grpo", seeds=1)
    outcomes = [ended(run, [0.1, 0.4], [1.0]) for run in asked.plan()]
    assert "score start" not in as_markdown(asked, make_rows(outcomes))
    for outcome, score in zip(outcomes, (0.25, 0.75), strict=True):
        outcome.run.folder.append_metrics({"step": 2, "eval/score": score})
    markdown = as_markdown(asked, make_rows(outcomes))
    for cells in ("| held-out end | score end | reward |", "| 0.250 |", "| score | +0.500 |"):
        assert cells in markdown


def test_curves_of_a_column_share_one_scale(recipe: str, tmp_path: Path) -> None:
    low, high = comparison(recipe, tmp_path, "stapo", "grpo", seeds=1).plan()
    rows = make_rows([ended(low, [0.0, 0.0], [1.0]), ended(high, [0.0, 1.0], [1.0])])
    assert sparklines(rows, "held-out accuracy", BARS) == ["0.00 ▁▁ 0.00", "0.00 ▁█ 1.00"]


@pytest.mark.parametrize("option", ["--seeds", "--jobs"])
def test_more_runs_than_anybody_could_wait_for_are_refused(recipe: str, tmp_path: Path, option: str) -> None:
    result = compare("stapo", "--recipe", recipe, "--out", str(tmp_path / "out"), option, "1" + "0" * 30)
    assert result.exit_code == 2
    assert "10000 runs at most" in result.stderr
