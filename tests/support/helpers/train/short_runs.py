"""Runs so short that they can be killed by the hundred.

A killed run has to be a process of its own. Each is forked from a server that has imported everything and computed
nothing, so it starts at once and torch's threads are not in the way.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from transformers.utils import logging

from trimtab import failpoints
from trimtab.config import Config, load
from trimtab.train import loop
from trimtab.train.loop import train
from trimtab.train.run import Run, RunStoppedError
from trimtab.train.run_folder import RunFolder

THOROUGH = bool(os.environ.get("TRIMTAB_THOROUGH"))

# Six steps of two updates over a task of ten problems (an epoch ends in the third step); rewards that differ by length,
# so that every step teaches; a controller with state; a warm start that saves in the middle.
SETTINGS = {
    "objective": '"stapo + stare(adaptive=true)"',
    "task.size": "10",
    "task.digits": "1",
    "rollout.prompts": "4",
    "rollout.samples": "4",
    "rollout.max_new_tokens": "4",
    "reward.overlong_buffer": "4",
    "update.per_step": "2",
    "update.lr": "3e-3",
    "update.token_budget": "64",
    "warm_start.steps": "4",
    "warm_start.eval_every": "2",
    "warm_start.batch_size": "4",
    "run.steps": "6",
    "run.checkpoint_every": "2",
    "run.eval_every": "3",
    "run.eval_problems": "4",
    "run.threads": "1",
    "run.device": "cpu",
}
STOPPED, REFUSED = 3, 2

_PRELOAD = [
    "torch._dynamo",
    "transformers.masking_utils",
    "transformers.tokenization_utils_tokenizers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "trimtab.train.loop",
]


def recipe(changes: Mapping[str, str] | None = None) -> Config:
    """The short run's recipe, with changes."""
    return load(None, [f"{key}={value}" for key, value in {**SETTINGS, **(changes or {})}.items()])


@dataclass
class Listener:
    """A reporter that remembers; `at_step` is called with every step that ends."""

    said: list[str] = field(default_factory=list)
    at_step: Callable[[int], None] = lambda step: None
    path: Path | None = None

    def message(self, text: str) -> None:
        self.said.append(text)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(text + "\n")

    def warm(self, step: int, steps: int, loss: float) -> None:
        pass

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        self.at_step(step)

    def close(self) -> None:
        pass

    def heard(self, *words: str) -> bool:
        """Whether one message has all the words."""
        return any(all(word in text for word in words) for text in self.said)


def short_run(folder: Path, changes: Mapping[str, str] | None = None, resume: bool = False) -> tuple[Run, Listener]:
    """A run in this process, ready to be trained."""
    listener = Listener()
    return Run(recipe(changes), RunFolder(folder), listener, resume=resume), listener


def trained(folder: Path, changes: Mapping[str, str] | None = None, resume: bool = False) -> tuple[Run, Listener]:
    """A run in this process, trained to its end."""
    run, listener = short_run(folder, changes, resume)
    train(run)
    return run, listener


@dataclass(frozen=True)
class Order:
    """A run to be made in a process of its own.

    `fault` is a named moment to die at; `spoil` a (step, update) whose plan is made NaN; `interrupts` says how many
    Ctrl-C the process gets at the end of a step.
    """

    folder: Path
    changes: dict[str, str] = field(default_factory=dict)
    resume: bool = False
    fault: str = "none:0"
    spoil: tuple[int, int] | None = None
    interrupts: dict[int, int] = field(default_factory=dict)

    def start(self) -> BaseProcess:
        """Fork it."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        process = context.Process(target=_child, args=(self,))
        process.start()
        return process

    def run(self, seconds: float | None = None) -> int:
        """Run it, kill it after so many seconds if it is still there, and give its exit code."""
        process = self.start()
        process.join(seconds)
        if process.is_alive():
            process.kill()
        process.join(60)
        assert process.exitcode is not None
        return process.exitcode

    def resumed(self, **changes: Any) -> Order:
        """The same run, to be gone on with."""
        return replace(self, **{"resume": True, "fault": "none:0", **changes})

    @property
    def said(self) -> str:
        """Everything the run has said."""
        path = self.folder.with_suffix(".said")
        return path.read_text() if path.exists() else ""

    @property
    def passed(self) -> dict[str, int]:
        """How often the run passed each named moment."""
        counts: dict[str, int] = json.loads(self.folder.with_suffix(".passed").read_text())
        return counts


def _child(order: Order) -> None:
    os.environ["TRIMTAB_FAILPOINT"] = order.fault
    logging.disable_progress_bar()

    def interrupt(step: int) -> None:
        for _ in range(order.interrupts.get(step, 0)):
            os.kill(os.getpid(), signal.SIGINT)

    listener = Listener(at_step=interrupt, path=order.folder.with_suffix(".said"))
    run = Run(recipe(order.changes), RunFolder(order.folder), listener, resume=order.resume)
    if order.spoil is not None:
        _spoil(run, *order.spoil)
    try:
        train(run)
    except RunStoppedError as error:
        listener.message(f"stopped: {error}")
        sys.exit(STOPPED)
    except KeyboardInterrupt:
        sys.exit(-signal.SIGINT)
    except ValueError as error:
        listener.message(f"refused: {error}")
        sys.exit(REFUSED)
    order.folder.with_suffix(".passed").write_text(json.dumps(failpoints._REACHED))


def _spoil(run: Run, step: int, update: int) -> None:
    """Make one update of one step NaN, however often the process is started anew."""
    whole, seen = loop.update, [(0, 0)]

    def spoilt(policy: Any, optimizer: Any, objective: Any, plan: Any, *rest: Any) -> Any:
        now, count = run.progress.step + 1, seen[-1][1] + 1 if seen[-1][0] == run.progress.step + 1 else 1
        seen.append((now, count))
        if (now, count) == (step, update):
            scale = plan.scale.clone()
            scale[0] = float("nan")
            plan = replace(plan, scale=scale)
        return whole(policy, optimizer, objective, plan, *rest)

    loop.update = spoilt


def contents(folder: Path) -> dict[str, str]:
    """Everything that a run leaves behind, file by file: clocks and nothing else are left out."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if name == "metrics.jsonl":
            for record in RunFolder(folder).records():
                lasting = {key: value for key, value in record.items() if not key.startswith("time/")}
                assert f"step {record['step']}" not in files, "a step was logged twice"
                files[f"step {record['step']}"] = json.dumps(lasting, sort_keys=True)
        else:
            files[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return files


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> Sequence[str]:
    """The names under which two runs differ."""
    return [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
