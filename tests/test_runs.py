"""`tt.train` trains as the command does, and `tt.load_run` reads what is in a run's folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import trimtab as tt
from helpers.train.short_runs import SETTINGS
from trimtab.cli import app
from trimtab.files import locked, write_json_lines
from trimtab.trainer.config import parse_toml
from trimtab.trainer.train.run import Run

NUMBERS = {key: parse_toml(f"x = {text}")["x"] for key, text in SETTINGS.items() if text[0].isdecimal()}
SHORT: dict[str, Any] = NUMBERS | {
    "objective": "stapo + stare(adaptive=true)", "run.device": "cpu", "run.steps": 2, "run.report": False
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tt.SavedRun:
    return tt.train("addition", SHORT, out=tmp_path_factory.mktemp("runs") / "first", quiet=True)


def without_times(records: list[dict[str, float]]) -> list[dict[str, float]]:
    return [
        {name: value for name, value in each.items() if not name.startswith(("time/", "memory/"))} for each in records
    ]


def test_a_run_from_python_has_the_numbers_and_the_output_of_the_command(
    finished: tt.SavedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [f"--set={key}={value}" for key, value in SETTINGS.items()]
    command = ["train", "addition", *settings, "--set=run.steps=2", "--set=run.report=false", "--out"]
    done = CliRunner().invoke(app, [*command, str(tmp_path / "a/run")])
    assert done.exit_code == 0
    assert without_times(tt.load_run(tmp_path / "a/run").metrics) == without_times(finished.metrics)
    monkeypatch.setenv("TRIMTAB_WARM_START", str(tmp_path / "c"))  # not taken from the other run
    tt.train("addition", SHORT, out=tmp_path / "b/run")

    shown = capsys.readouterr().out.replace(str(tmp_path / "b/run"), str(tmp_path / "a/run"))
    shown = shown.replace(str(tmp_path / "c"), str(tmp_path / ".warm_start"))
    times = re.compile(r"\d+:\d\d\.|^  time .*\n", re.MULTILINE)
    assert times.sub("", shown) == times.sub("", done.stdout)
    assert "step 2/2  reward " in shown


def test_the_threads_of_the_caller_are_as_before(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        tt.train("addition", {**SHORT, "run.steps": 1, "run.threads": 1}, out=tmp_path / "run", quiet=True)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_run_can_be_read(finished: tt.SavedRun) -> None:
    run = tt.load_run(str(finished.path))
    assert (run.state, run.step, run.config.run.steps) == ("finished", 2, 2)
    assert [record["step"] for record in run.metrics] == [0, 1, 2]
    steps, rewards = run.curve("reward/mean")
    assert steps == [1, 2] and rewards == [record["reward/mean"] for record in run.metrics[1:]]
    assert run.records.steps == [1, 2]
    assert run.alarms == []
    ids = torch.tensor([run.tokenizer.encode("1+2=")])
    assert run.model(ids).logits.shape[:2] == ids.shape
    with pytest.raises(ValueError, match=r"no metric 'reward/maen'; it has .*reward/mean"):
        run.curve("reward/maen")


def test_the_model_of_a_folder_called_demo_is_the_runs(
    finished: tt.SavedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo").symlink_to(finished.path.absolute())
    monkeypatch.chdir(tmp_path)
    for one, other in zip(tt.load_run("demo").model.parameters(), finished.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_quiet_prints_nothing_but_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tt.train("addition", {**SHORT, "run.steps": 1, "run.eval_every": 0}, out=tmp_path / "a", quiet=True)
    assert capsys.readouterr() == ("", "")
    same = {**SHORT, "run.steps": 1, "rollout.max_new_tokens": 1, "reward.overlong_buffer": 0, "warm_start.steps": 0}
    tt.train("addition", same, out=tmp_path / "b", quiet=True)
    assert "warning: step 1: rewards do not differ" in capsys.readouterr().err


def test_a_recipe_may_be_a_table_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    task, sizes = {"name": "arithmetic", "digits": 1}, {"prompts": 2, "samples": 2, "max_new_tokens": 3}
    table = {"objective": "grpo", "task": task, "rollout": sizes, "run": {"steps": 1, "report": False, "threads": 1}}
    run = tt.train(table, {"run.eval_every": 0, "run.patience": 0}, quiet=True)
    assert run.path == Path("runs/arithmetic-grpo-1")
    assert run.config.objective["name"] == "grpo"
    assert table["run"] == {"steps": 1, "report": False, "threads": 1}  # settings change the run, not the table
    again = tt.train(run.path / "config.toml", out="again", quiet=True)
    assert without_times(again.metrics) == without_times(run.metrics)


def test_a_folder_holds_one_run(finished: tt.SavedRun) -> None:
    before = (finished.path / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"already holds a run: choose another `out`.*tt\.train\(resume="):
        tt.train("addition", SHORT, out=finished.path)
    with locked(finished.path), pytest.raises(ValueError, match="in use by another process"):
        tt.train(resume=finished.path)
    assert (finished.path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"settings": {"run.stepps": 1}}, r"run\.stepps"),
        ({"settings": {"steps.": 1}}, r"write section\.key=value"),
        ({"recipe": "demmo"}, "unknown recipe 'demmo'"),
        ({"recipe": {"objective": "grrpo"}}, "grrpo"),
        ({"resume": "nowhere"}, "'nowhere' holds no run"),
        ({"resume": "nowhere", "out": "x"}, "leave out `out`"),
    ],
)
def test_a_mistake_is_named_before_anything_starts(
    arguments: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        tt.train(**arguments)
    assert list(tmp_path.iterdir()) == []


def test_one_of_several_processes_is_told_to_use_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="--gpus N"):
        tt.train()


def interrupt_at(step: int, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C so many times when a run has finished a step."""
    original = Run.finish_step

    def finish_step(run: Run, *arguments: Any) -> None:
        original(run, *arguments)
        if run.progress.step == step:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Run, "finish_step", finish_step)


def test_an_interrupt_ends_the_run_after_its_step_and_it_can_go_on(
    finished: tt.SavedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGINT)
    interrupt_at(1, 1, monkeypatch)
    run = tt.train("addition", SHORT, out=tmp_path / "run", quiet=True)
    assert (run.state, run.step) == ("stopped", 1)
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.undo()
    resumed = tt.train(resume=run.path, quiet=True)
    assert resumed.state == "finished"
    assert without_times(resumed.metrics) == without_times(finished.metrics)


def test_a_second_interrupt_ends_it_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(1, 2, monkeypatch)
    with pytest.raises(KeyboardInterrupt, match="stopped at once; resume with"):
        tt.train("addition", SHORT, out=tmp_path / "run", quiet=True)
    assert tt.load_run(tmp_path / "run").state == "failed"  # step 1 was not saved


def test_the_state_of_a_run_is_read_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("run = { steps = 30 }")
    run = tt.load_run(tmp_path)
    with locked(tmp_path):
        assert run.state == "running"
    assert run.state == "failed"
    accuracy = [0.8 if step < 10 else 0.1 for step in range(31)]
    write_json_lines(tmp_path / "metrics.jsonl", [{"step": n, "eval/accuracy": a} for n, a in enumerate(accuracy)])
    assert run.state == "collapsed"
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "checkpoints/step-00000000").mkdir(parents=True)
    assert run.state == "stopped"
    with pytest.raises(ValueError, match="holds no run: a run is a folder with"):
        tt.load_run(tmp_path / "checkpoints")


def test_train_is_there_and_torch_is_imported_only_with_it() -> None:
    code = """
import sys, trimtab as tt
assert "torch" not in sys.modules and set(tt.__all__) <= set(dir(tt))
assert callable(tt.train)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ, timeout=300)
