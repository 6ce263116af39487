"""Read a run from its folder: how far it came, and what it left."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from trimtab.collapse import Collapse, find_collapse
from trimtab.files import is_locked
from trimtab.record import Records, open_run
from trimtab.step_lines import iter_step_lines, last_step, read_metrics
from trimtab.text import shown
from trimtab.trainer.config import Config, list_checkpoints, load_stored
from trimtab.trainer.model import Policy
from trimtab.trainer.train.build import open_policy
from trimtab.trainer.train.run_folder import RunFolder

State = Literal["running", "finished", "stopped", "collapsed", "failed"]


@dataclass(frozen=True)
class SavedRun:
    """A run in its folder. What changes while it runs (state, metrics, alarms) is read anew every time.

    ```python
    run = tt.load_run("runs/demo-dapo+trim-1")
    run.state, run.step                      # ("finished", 300)
    run.metrics[-1]["eval/accuracy"]
    steps, entropy = run.curve("policy/entropy")
    ```
    """

    path: Path

    @cached_property
    def config(self) -> Config:
        """The recipe with all settings."""
        return load_stored(self._files.config)

    @property
    def step(self) -> int:
        """The last step that is in the metrics, 0 before the first."""
        return last_step(self._files.metrics)

    @property
    def state(self) -> State:
        """How far the run has come.

        `stopped` runs have saved their last step and can go on from it; `failed` ones ended without saving it.
        """
        if is_locked(self.path):
            return "running"
        if self.collapse is not None:
            return "collapsed"
        # The model is written after the last step.
        if self.step >= self.config.run.steps and self._files.model.is_dir():
            return "finished"
        saved = [int(path.name.removeprefix("step-")) for path in list_checkpoints(self._files.checkpoints)]
        return "stopped" if self.step in saved else "failed"

    @property
    def collapse(self) -> Collapse | None:
        """Since when the run has collapsed, and why; None if it has not."""
        return find_collapse(self.metrics)

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The metrics of every step, each with its `step`; docs/metrics.md explains them."""
        return read_metrics(self._files.metrics, warnings.warn)

    def curve(self, metric: str) -> tuple[list[int], list[float]]:
        """Return the steps at which a metric was measured, and its values, as a plot takes them."""
        records = self.metrics
        found = [(int(record["step"]), record[metric]) for record in records if metric in record]
        if not found:
            known = sorted({name for record in records for name in record} - {"step"})
            raise ValueError(f"{self.path} has no metric {shown(metric)}; it has {', '.join(known) or 'none'}")
        return [step for step, _ in found], [value for _, value in found]

    @property
    def alarms(self) -> list[dict[str, Any]]:
        """The alarms of the run: step, name, message, evidence and what to try."""
        return list(iter_step_lines(self._files.alarms, warnings.warn))

    @property
    def records(self) -> Records:
        """Every response, token by token: docs/record.md."""
        return open_run(self.path)

    @property
    def model(self) -> Any:
        """The trained model, as one of transformers: the finished one, or that of the newest checkpoint."""
        return self._policy.model

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model."""
        return self._policy.tokenizer

    @cached_property
    def _policy(self) -> Policy:
        policy = open_policy(str(self.path.absolute()))  # absolute: a folder `demo` is not the model `demo`
        policy.model.eval()
        return policy

    @property
    def _files(self) -> RunFolder:
        return RunFolder(self.path)


def load_run(path: str | Path) -> SavedRun:
    """Open the folder of a run, which may still be going on."""
    folder = Path(path)
    if not (folder / "config.toml").is_file():
        raise ValueError(f"{shown(str(path), 300)} holds no run: a run is a folder with config.toml")
    return SavedRun(folder)
