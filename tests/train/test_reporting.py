"""External loggers get every step's metrics; one that fails does not stop the run."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from trimtab.config import load
from trimtab.train.reporting import Loggers
from trimtab.train.run_folder import RunFolder


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
    monkeypatch.setitem(sys.modules, "trackio", None)
    warnings: list[str] = []
    loggers = Loggers(load(None, ["run.loggers=['wandb', 'trackio']"]), RunFolder(tmp_path), warnings.append)
    for step in (1, 2, 3):
        loggers.log(step, {"reward/mean": 0.5})
    loggers.close()
    assert logged == [1]
    assert len(warnings) == 2
    assert "trackio logger could not be opened" in warnings[0]
    assert "wandb logger failed" in warnings[1]
