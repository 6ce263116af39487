"""A step leaves nothing behind in memory: a run of a million steps needs no more than one of a hundred."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

from helpers.train.short_runs import MessageLog, recipe
from trimtab.insight.alarms import alarm_monitor, detector_input
from trimtab.trainer.train.loop import train
from trimtab.trainer.train.run import Run
from trimtab.trainer.train.run_folder import RunFolder


def test_a_step_keeps_no_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The alarms' history is as full after 45 steps as after 78: it is cut from 21 values to 10 every 11 steps.
    monkeypatch.setattr(detector_input, "EDGE", 5)
    config = recipe(
        {
            "run.steps": "79",
            "run.patience": "0",
            "update.lr": "1e-6",
            "run.eval_every": "1",
            "run.checkpoint_every": "5",
            "record.max_megabytes": "0.1",
        }
    )
    counts: dict[int, int] = {}

    def count(step: int) -> None:
        if step in (45, 78):
            assert run.trainer.recorder is not None
            run.trainer.recorder.flush()  # its thread is idle while objects are counted
            gc.collect()
            counts[step] = sys.getallocatedblocks()

    run = Run(config, RunFolder(tmp_path / "run"), MessageLog(at_step=count), monitor=alarm_monitor(config))
    train(run)
    # Caches of torch and transformers still fill a little; one number kept for each metric would be 35 a step.
    assert counts[78] - counts[45] < 33 * 8, counts
