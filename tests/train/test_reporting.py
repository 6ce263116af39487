"""External loggers get every step's metrics; one that fails does not stop the run."""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from helpers.train.short_runs import short_run
from trimtab.grading import VERDICT_KINDS
from trimtab.trainer.config import load
from trimtab.trainer.train.alarm_actions import Alarm
from trimtab.trainer.train.loop import train
from trimtab.trainer.train.reporting import Loggers, SampleText
from trimtab.trainer.train.run_folder import RunFolder


def test_a_logger_that_fails_does_not_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[int] = []

    class Run:
        def log(self, metrics: dict[str, float], step: int) -> None:
            if step == 2:
                raise ConnectionError("gone")
            logged.append(step)

        def finish(self) -> None:
            raise AssertionError("a logger that failed is not closed")

    wandb = types.ModuleType("wandb")
    wandb.init = lambda **options: Run()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    warnings: list[str] = []
    loggers = Loggers(load(None, ["run.loggers=['wandb']"]), RunFolder(tmp_path), warnings.append)
    for step in (1, 2, 3):
        loggers.log(step, {"reward/mean": 0.5})
    loggers.close()
    assert logged == [1]
    assert len(warnings) == 1
    assert "wandb logger failed" in warnings[0]


def test_a_logger_that_is_not_installed_is_an_error_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = recorded_modules(monkeypatch, "wandb")
    monkeypatch.setitem(sys.modules, "trackio", None)
    monkeypatch.setattr("trimtab.trainer.train.run.build_trainer", lambda *_: pytest.fail("the model was loaded"))
    run, _ = short_run(tmp_path / "run", {"run.loggers": "['wandb', 'trackio']"})
    with pytest.raises(ValueError, match=r"run.loggers: trackio cannot be opened: .*pip install .*\[trackio\]'"):
        train(run)
    assert [call for call, _ in found["wandb"].calls] == ["init", "finish"], "the other one is closed again"
    assert not (tmp_path / "run").exists(), "the same command can be used again"


def test_a_logger_without_an_account_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: Any) -> None:
        raise RuntimeError("api_key not configured \x1b[2J")

    wandb = types.ModuleType("wandb")
    wandb.init = refuse  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with pytest.raises(ValueError, match="api_key not configured") as error:
        Loggers(load(None, ["run.loggers=['wandb']"]), RunFolder(tmp_path), print)
    assert "run `wandb login`" in str(error.value) and 'run.wandb_mode = "offline"' in str(error.value)
    assert "\x1b" not in str(error.value)


def test_the_recipe_names_project_run_group_tags_and_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = recorded_modules(monkeypatch, "wandb", "trackio")
    both = "run.loggers=['wandb', 'trackio']"
    Loggers(load(None, [both]), RunFolder(tmp_path / "mine"), print)
    names = ["run.logger_project=maths", "run.logger_name=first"]
    only = ["run.wandb_group=sweep", "run.wandb_tags=['a', 'b']", "run.wandb_mode=offline"]
    Loggers(load(None, [both, *names, *only]), RunFolder(tmp_path / "mine"), print)
    plain, chosen = ({k: v for k, v in given[1].items() if k not in ("config", "dir")}
                     for call, given in found["wandb"].calls if call == "init")  # fmt: skip
    assert plain == {"project": "trimtab", "name": "mine"}, "the rest is left to wandb's environment variables"
    assert chosen == {"project": "maths", "name": "first", "group": "sweep", "tags": ["a", "b"], "mode": "offline"}
    again = [given[1] for call, given in found["trackio"].calls if call == "init"][-1]
    assert (again["project"], again["name"]) == ("maths", "first")


def test_settings_of_a_logger_that_was_not_asked_for_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"wandb_group is for W&B, but loggers = \[\]"):
        load(None, ["run.wandb_group=sweep"])


class Recorded:
    """Stands in for wandb, trackio and tensorboard: keeps what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **options: Any) -> Any:
            self.calls.append((name, (args, options)))
            return self

        return call


def recorded_modules(monkeypatch: pytest.MonkeyPatch, *names: str) -> dict[str, Recorded]:
    """Put recorders in the place of packages."""
    found = {name: Recorded() for name in names}
    for name, module in found.items():
        module.__spec__ = ModuleSpec(name, None)  # transformers asks for it  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    return found


SAMPLES = [SampleText("1+1=", "It is </td> 2.\n# \x1b[31mred", "2", "correct", 1.0)]
ALARM = Alarm(10, "ratio", "the policy moves 0.06 nats", {}, "Try a lower update.lr")


def test_loggers_get_sample_texts_and_alarms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = recorded_modules(monkeypatch, "wandb", "trackio", "torch.utils.tensorboard", "pandas")
    warnings: list[str] = []
    config = load(None, ["run.loggers=['wandb', 'trackio', 'tensorboard']", "run.log_samples=5"])
    loggers = Loggers(config, RunFolder(tmp_path), warnings.append)
    for step in (9, 10):
        loggers.log(step, {"reward/mean": 0.5}, SAMPLES)
    loggers.alarm(ALARM)
    loggers.close()
    assert not warnings
    tables = [given[1] for call, given in found["wandb"].calls if call == "Table"]
    assert len(tables) == 1, "every fifth step"
    assert tables[0]["columns"] == ["prompt", "response", "answer", "verdict", "reward"]
    assert tables[0]["data"] == [["1+1=", "It is </td> 2.\n# \\x1b[31mred", "2", "correct", 1.0]]
    (alert,) = [given[1] for call, given in found["wandb"].calls if call == "alert"]
    assert alert == {"title": "ratio at step 10", "text": "the policy moves 0.06 nats. Try a lower update.lr"}
    frames = [given[0][0] for call, given in found["pandas"].calls if call == "DataFrame"]
    assert "&lt;/td&gt;" in frames[0][0]["response"] and frames[1][0]["alarm"] == "ratio"
    texts = [given[0] for call, given in found["torch.utils.tensorboard"].calls if call == "add_text"]
    assert [text[0] for text in texts] == ["samples", "alarms/ratio"] and [text[2] for text in texts] == [10, 10]
    assert all(line.startswith("    ") for text in texts for line in text[1].split("\n")), "nothing is rendered"


def test_a_logger_that_takes_no_samples_still_gets_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[int] = []
    old = types.ModuleType("wandb")
    run = types.SimpleNamespace(log=lambda values, step: logged.append(step), finish=lambda: None)
    old.init = lambda **options: run  # type: ignore[attr-defined]  # no Table, no alert
    monkeypatch.setitem(sys.modules, "wandb", old)
    warnings: list[str] = []
    loggers = Loggers(load(None, ["run.loggers=['wandb']", "run.log_samples=1"]), RunFolder(tmp_path), warnings.append)
    for step in (1, 2, 3):
        loggers.log(step, {"reward/mean": 0.5}, SAMPLES)
        loggers.alarm(ALARM)
    loggers.close()
    assert logged == [1, 2, 3]
    assert len(warnings) == 2
    assert "gets no more samples" in warnings[0] and "gets no more alarms" in warnings[1]


def test_a_run_sends_its_own_samples_and_alarms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = recorded_modules(monkeypatch, "wandb")
    settings = {"run.loggers": "['wandb']", "run.log_samples": "2", "run.steps": "3", "warm_start.steps": "0"}
    run, _ = short_run(tmp_path / "run", settings)
    run.monitor = lambda record: [ALARM] if record["step"] == 2 else []
    train(run)
    calls = [call for call, _ in found["wandb"].calls]
    assert calls.count("Table") == 1 and calls.count("alert") == 1
    rows = next(given[1]["data"] for call, given in found["wandb"].calls if call == "Table")
    assert len(rows) == 4 and all(isinstance(row[1], str) and row[3] in VERDICT_KINDS for row in rows)
