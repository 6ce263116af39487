"""`trimtab compare`: every objective and seed once, side by side, whatever becomes of single runs."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from trimtab.cli import app
from trimtab.compare.report import as_json, as_markdown, make_rows, show_comparison, sparklines
from trimtab.compare.runs import Comparison, Fleet, Job, Result, plan_jobs
from trimtab.console.launch import STOPPED
from trimtab.train.run_folder import resolved_toml

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


def comparison(recipe: str, out: Path, *objectives: str, **options: Any) -> Comparison:
    return Comparison(objectives, out, recipe, **options)


def compare(*words: str) -> Any:
    result = CliRunner().invoke(app, ["compare", *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


# The real thing: processes that train. One folder is blocked by a file, so that its run fails.


@pytest.fixture(scope="module")
def compared(recipe: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    out = tmp_path_factory.mktemp("compared")
    (out / "sspo+s2t-seed0").write_text("in the way")
    return out, compare("stapo", "sspo + s2t", "--recipe", recipe, "--seeds", "1", "--out", str(out))


def test_a_failing_run_is_told_and_does_not_stop_the_others(compared: tuple[Path, Any]) -> None:
    out, result = compared
    table = json.loads((out / "compare.json").read_text())["objectives"]
    assert result.exit_code == 3
    assert [table[name]["runs"][0]["state"] for name in table] == ["finished", "failed"]
    assert "sspo+s2t-seed0 is a file" in table["sspo + s2t"]["runs"][0]["why"]
    assert "sspo + s2t, seed 0: failed: " in result.output
    assert table["sspo + s2t"]["mean"]["accuracy_end"] is None


def test_table_files_and_command_say_what_was_compared(compared: tuple[Path, Any], recipe: str) -> None:
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
    compared: tuple[Path, Any], recipe: str
) -> None:
    out, _ = compared
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
    assert len(list((out / ".warm_start").iterdir())) == 1
    assert f"written: {out / 'report.html'}" in result.output
    page = (out / "report.html").read_text()
    assert "stapo-seed0" in page
    assert "sspo+s2t-seed0" in page


def test_a_run_that_was_cut_off_is_resumed(recipe: str, tmp_path: Path) -> None:
    (job,) = plan_jobs(comparison(recipe, tmp_path, "stapo", seeds=1))
    assert (job.state(), job.command()[-2:]) == ("new", ["--out", str(job.folder.path)])
    finished(job, [0.1, 0.4], [1.0])
    assert (job.state(), job.command()[-2:]) == ("cut off", ["--resume", str(job.folder.path)])
    job.folder.append({"step": 3})
    assert job.state() == "cut off"  # its model is not there yet
    (job.folder.path / "model").mkdir()
    assert job.state() == "finished"
    with job.folder.metrics.open("a") as file:
        file.write('{"step": 4, "torn')
    assert job.last_step() == 3


def test_a_folder_of_another_recipe_is_refused(compared: tuple[Path, Any], recipe: str) -> None:
    out, _ = compared
    result = compare("stapo", "--recipe", recipe, "--seeds", "1", "--out", str(out), "--set", "update.lr=0.5")
    assert result.exit_code == 2
    assert "holds a run of another recipe" in result.stderr
    assert "update.lr: 0.001 -> 0.5" in result.stderr
    fewer = compare("stapo", "--recipe", recipe, "--seeds", "1", "--out", str(out), "--set", "run.steps=2")
    assert "3 are done already, 2 are asked for" in fewer.stderr


# Before anything runs.


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["stapo", "grpoo"], "did you mean grpo"),
        (["sspo+s2t", "sspo + s2t"], "given twice"),
        (["stapo", "--seeds", "0"], "at least 1"),
        (["stapo", "--set", "run.stepps=1"], "did you mean steps"),
        (["stapo", "--recipe", "nowhere"], "unknown recipe"),
    ],
)
def test_mistakes_are_found_before_the_first_run(tmp_path: Path, words: list[str], said: str) -> None:
    result = compare(*words, "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert said in result.stderr
    assert not (tmp_path / "out").exists()


def test_every_objective_runs_with_every_seed_and_every_setting(recipe: str, tmp_path: Path) -> None:
    settings = ("run.seed=7", "objective.scope=micro", "update.lr=0.5")
    jobs = plan_jobs(comparison(recipe, tmp_path, "stapo", "sspo + s2t", seeds=2, settings=settings))
    assert [job.name for job in jobs] == ["stapo-seed7", "stapo-seed8", "sspo+s2t-seed7", "sspo+s2t-seed8"]
    assert [job.config.run.seed for job in jobs] == [7, 8, 7, 8]
    assert {job.config.build_objective().scope for job in jobs} == {"micro"}
    assert jobs[3].config.build_objective().name == "sspo + s2t"
    assert len({job.folder.path.parent for job in jobs}) == 1


# The fleet, with processes that only pretend to train.


def fleet(recipe: str, out: Path, monkeypatch: pytest.MonkeyPatch, code: str, **options: Any) -> Fleet:
    """Jobs that run a line of Python; `folder` in it is the run's folder."""
    lines: list[str] = []

    def command(job: Job) -> list[str]:
        head = f"import os, sys, time, pathlib; folder = pathlib.Path({str(job.folder.path)!r}); "
        return [sys.executable, "-c", head + code.replace("OBJECTIVE", repr(job.objective))]

    monkeypatch.setattr(Job, "command", command)
    asked = comparison(recipe, out, "stapo", "grpo", seeds=2, **options)
    return Fleet(plan_jobs(asked), asked.jobs, lines.append)


WARM = "(folder / 'checkpoints/step-0').mkdir(parents=True); "


def most_at_once(out: Path) -> int:
    moments = [float(line) for file in sorted(out.glob("*.times")) for line in file.read_text().split()]
    spans = list(zip(moments[::2], moments[1::2], strict=True))
    return max(sum(a <= start < b for a, b in spans) for start, _ in spans)


TIMED = (
    "start = time.time(); {}time.sleep(0.3); "
    "folder.parent.joinpath(folder.name + '.times').write_text(f'{{start}} {{time.time()}}')"
)


@pytest.mark.parametrize("jobs", [1, 2, 4])
def test_so_many_run_at_a_time_as_were_asked_for(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    settings = ("warm_start.steps=0",)
    fleet(recipe, tmp_path, monkeypatch, TIMED.format(""), jobs=jobs, settings=settings).run()
    assert most_at_once(tmp_path) == jobs


def test_the_second_run_of_a_seed_waits_for_the_first_ones_warm_start(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold = "" + TIMED.format("")
    fleet(recipe, tmp_path, monkeypatch, cold, jobs=4).run()
    assert most_at_once(tmp_path) == 2  # one for each seed


def test_it_waits_no_longer_than_the_warm_start(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = TIMED.format(WARM).replace("0.3", "1.0")
    fleet(recipe, tmp_path, monkeypatch, code, jobs=4).run()
    assert most_at_once(tmp_path) == 4


def test_a_failure_says_why(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "os.kill(os.getpid(), 9) if OBJECTIVE == 'grpo' else "
        "sys.exit(sys.stderr.write('noise\\ntrimtab: no \\x1b[31mgood\\n  at all\\n\\nmore') and 2)"
    )
    results = fleet(recipe, tmp_path, monkeypatch, code, jobs=4, settings=("warm_start.steps=0",)).run()
    assert [result.state for result in results] == ["failed"] * 4
    assert results[0].why == "no \\x1b[31mgood; at all"
    assert results[2].why == "killed by SIGKILL"


# A run that would go on for long, and that notes a Ctrl-C as its own.
LONG = (
    "import signal; folder.mkdir(); "
    "signal.signal(signal.SIGINT, lambda *_: (folder.joinpath('saved').touch(), os._exit(3))); "
    "folder.joinpath('ready').touch(); time.sleep(30)"
)


@pytest.fixture
def heard() -> Iterator[None]:
    """None of the signals is ignored, as Ctrl-C is where the tests themselves run in the background."""
    usual = dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), signal.default_int_handler)
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    assert {number: signal.getsignal(number) for number in usual} == usual
    for number, handler in before.items():
        signal.signal(number, handler)


@contextmanager
def signalled(out: Path, *numbers: int, files: str = "*/ready", count: int = 2) -> Iterator[None]:
    """Send these signals to this process once so many of these files are there."""
    over = threading.Event()

    def send() -> None:
        while len(list(out.glob(files))) < count:
            if over.wait(0.02):
                return
        for number in numbers:
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    yield
    over.set()
    thread.join()


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_lets_the_runs_finish_their_step(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    ships = fleet(recipe, tmp_path, monkeypatch, LONG, jobs=2)
    with signalled(tmp_path, number):
        results = ships.run()
    assert ships.interrupted
    assert len(list(tmp_path.glob("*/saved"))) == 2
    assert [result.why for result in results] == ["interrupted"] * 2 + ["not run: interrupted"] * 2
    assert not any(result.counts for result in results)


class Closed(io.StringIO):
    """A terminal that is closed as soon as two runs are under way."""

    def __init__(self, out: Path) -> None:
        super().__init__()
        self.out = out

    def write(self, text: str) -> int:
        if len(list(self.out.glob("*/ready"))) == 2:
            raise OSError(errno.EIO, "Input/output error")
        return super().write(text)


@pytest.mark.usefixtures("heard")
def test_a_closed_terminal_costs_no_run_its_checkpoint(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ships = fleet(recipe, tmp_path, monkeypatch, LONG, jobs=2)
    file = Closed(tmp_path)
    with signalled(tmp_path, signal.SIGHUP):
        assert show_comparison(ships.jobs[0].comparison, ships.jobs, Console(file=file)) == STOPPED
    assert len(list(tmp_path.glob("*/saved"))) == 2
    assert file.getvalue().count("starts") == 2
    assert (tmp_path / "compare.md").exists()


@pytest.mark.usefixtures("heard")
def test_a_second_ctrl_c_stops_at_once(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stubborn = LONG.replace("os._exit(3)", "os._exit(3) if OBJECTIVE == 'stapo' else None")
    ships = fleet(recipe, tmp_path, monkeypatch, stubborn, jobs=4, settings=("warm_start.steps=0",))
    with signalled(tmp_path, signal.SIGINT, count=4), signalled(tmp_path, signal.SIGINT, files="*/saved", count=4):
        results = ships.run()
    assert [result.job.name for result in results] == [job.name for job in ships.jobs]  # each is told once
    assert [result.why for result in results[2:]] == ["stopped at once"] * 2


@pytest.mark.usefixtures("heard")
def test_a_run_that_ctrl_c_meets_while_it_starts_is_not_lost(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(*args, **kwargs))
        os.kill(os.getpid(), signal.SIGINT)
        return started[-1]

    ships = fleet(recipe, tmp_path, monkeypatch, LONG, jobs=2)
    with monkeypatch.context() as patched:
        patched.setattr("trimtab.compare.runs.subprocess", SimpleNamespace(DEVNULL=subprocess.DEVNULL, Popen=start))
        results = ships.run()
    assert [process.poll() is not None for process in started] == [True]  # and no other was started
    assert [result.why for result in results] == ["interrupted"] + ["not run: interrupted"] * 3


@pytest.mark.usefixtures("heard")
def test_what_is_ignored_stays_so_but_the_runs_are_stopped_all_the_same(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a script's background, or under nohup: a run that was started to ignore Ctrl-C could not be stopped."""
    plain = "folder.mkdir(); folder.joinpath('ready').touch(); time.sleep(30)"
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    ships = fleet(recipe, tmp_path, monkeypatch, plain, jobs=2)
    with signalled(tmp_path, signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        results = ships.run()
    assert ships.interrupts == 1
    assert [result.why for result in results] == ["interrupted"] * 2 + ["not run: interrupted"] * 2
    assert [signal.signal(number, handler) for number, handler in before.items()] == [signal.SIG_IGN] * 2


# Numbers.


def finished(job: Job, accuracy: list[float], entropy: list[float], state: Any = "finished") -> Result:
    """A run's folder with these numbers in it."""
    job.folder.path.mkdir(parents=True)
    (job.folder.path / "config.toml").write_text(resolved_toml(job.config))
    job.folder.append({"step": 0, "eval/accuracy": accuracy[0]})
    for step, (right, open_) in enumerate(zip(accuracy[1:], entropy, strict=True), start=1):
        job.folder.append(
            {"step": step, "eval/accuracy": right, "policy/entropy": open_, "s2t/entropy_threshold": float("nan")}
        )
    return Result(job, state)


def test_means_and_spreads_are_over_seeds(recipe: str, tmp_path: Path) -> None:
    asked = comparison(recipe, tmp_path, "stapo", "grpo", seeds=2)
    one, two, three, four = plan_jobs(asked)
    rows = make_rows(
        [
            finished(one, [0.1, 0.4], [1.0]),
            finished(two, [0.1, 0.6], [2.0], "stopped"),  # counts with what it reached
            finished(three, [0.1, 0.9], [0.0]),
            finished(four, [0.1, 0.0], [9.0], "failed"),  # does not
        ]
    )
    stapo, grpo = rows
    assert stapo.mean["accuracy_end"] == pytest.approx(0.5)
    assert stapo.spread["accuracy_end"] == pytest.approx(0.1 * 2**0.5)
    assert stapo.mean["entropy_end"] == pytest.approx(1.5)
    assert (grpo.mean["accuracy_end"], grpo.spread["accuracy_end"], grpo.runs) == (0.9, None, "1/2")
    markdown = as_markdown(asked, rows)
    assert "| stapo | 2/2 | 10.0% ± 0% | 50.0% ± 14.1% |" in markdown
    assert "| grpo | 1/2 | 10.0% | 90.0% |" in markdown
    assert (
        json.loads(as_json(asked, rows), parse_constant=pytest.fail)["objectives"]["grpo"]["spread"]["clipped"] is None
    )


def test_curves_of_a_column_share_one_scale(recipe: str, tmp_path: Path) -> None:
    low, high = plan_jobs(comparison(recipe, tmp_path, "stapo", "grpo", seeds=1))
    rows = make_rows([finished(low, [0.0, 0.0], [1.0]), finished(high, [0.0, 1.0], [1.0])])
    assert sparklines(rows, "held-out accuracy") == ["0.00 ▁▁ 0.00", "0.00 ▁█ 1.00"]
