"""Runs of six tiny steps, in this process or in one of their own that can be killed."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from transformers.utils import logging

from trimtab import failpoints
from trimtab.trainer.config import Config, load
from trimtab.trainer.train import Run, RunStoppedError, loop
from trimtab.trainer.train.loop import train
from trimtab.trainer.train.run_folder import RunFolder

# Six steps of two updates over a task of ten problems, so that an epoch ends in the third step. Rewards differ by
# length, so that every step has a learning signal; the objective has a controller with state; the warm start saves a
# checkpoint in the middle.
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

# Each process is forked from a server that has imported these and computed nothing: it starts at once, and no thread
# of torch is running when it forks.
PRELOAD = [
    "torch._dynamo",
    "transformers.masking_utils",
    "transformers.tokenization_utils_tokenizers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "trimtab.trainer.train.loop",
]


def recipe(changes: Mapping[str, str | None] | None = None) -> Config:
    """Return the configuration of a short run, with changes; None takes a setting away."""
    settings = {**SETTINGS, **(changes or {})}
    return load(None, [f"{key}={value}" for key, value in settings.items() if value is not None])


@dataclass
class MessageLog:
    """A reporter that collects messages, also in a file if `path` is given; `at_step` is called after every step."""

    messages: list[str] = field(default_factory=list)
    at_step: Callable[[int], None] = lambda step: None
    path: Path | None = None

    def message(self, text: str) -> None:
        self.messages.append(text)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(text + "\n")

    def warm(self, step: int, steps: int, loss: float) -> None:
        pass

    def step(self, step: int, steps: int, metrics: Mapping[str, float], samples: object = ()) -> None:
        self.at_step(step)

    def close(self) -> None:
        pass

    def has(self, *words: str) -> bool:
        """Return whether one message contains all the words."""
        return any(all(word in text for word in words) for text in self.messages)


def short_run(
    folder: Path, changes: Mapping[str, str | None] | None = None, resume: bool = False
) -> tuple[Run, MessageLog]:
    """Return a run in this process, ready to be trained."""
    log = MessageLog()
    return Run(recipe(changes), RunFolder(folder), log, resume=resume), log


def trained(folder: Path, changes: Mapping[str, str] | None = None, resume: bool = False) -> tuple[Run, MessageLog]:
    """Return a run in this process, trained to its end."""
    run, log = short_run(folder, changes, resume)
    train(run)
    return run, log


@dataclass(frozen=True)
class RunProcess:
    """A run in a process of its own.

    `failpoint` is where to die; `nan_update` is the (step, update) whose plan gets a NaN; `interrupts` is how many
    Ctrl-C the process gets at the end of a step.
    """

    folder: Path
    changes: dict[str, str] = field(default_factory=dict)
    resume: bool = False
    failpoint: str = "none:0"
    nan_update: tuple[int, int] | None = None
    interrupts: dict[int, int] = field(default_factory=dict)

    def run(self, seconds: float | None = None, target: Callable[[RunProcess], None] | None = None) -> int:
        """Run it, kill it after so many seconds if it is still alive, and return its exit code."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        process = context.Process(target=target or run_in_child, args=(self,))
        process.start()
        process.join(seconds)
        if process.is_alive():
            process.kill()
        process.join()
        assert process.exitcode is not None
        return process.exitcode

    def resumed(self, **changes: Any) -> RunProcess:
        """Return the same run, to be resumed."""
        return replace(self, **{"resume": True, "failpoint": "none:0", **changes})

    @property
    def messages(self) -> str:
        """The messages of the run, one per line."""
        path = self.folder.with_suffix(".messages")
        return path.read_text() if path.exists() else ""

    @property
    def failpoints(self) -> dict[str, int]:
        """How often the run passed each failpoint."""
        counts: dict[str, int] = json.loads(self.folder.with_suffix(".failpoints").read_text())
        return counts


def run_in_child(process: RunProcess) -> None:
    """Train the run and exit with a code that says how it ended."""
    os.environ["TRIMTAB_FAILPOINT"] = process.failpoint
    # The fork server has the environment of the test that started it.
    os.environ["TRIMTAB_WARM_START"] = str(process.folder.parent / ".warm_start")
    logging.disable_progress_bar()

    def interrupt(step: int) -> None:
        for _ in range(process.interrupts.get(step, 0)):
            signal.raise_signal(signal.SIGINT)

    log = MessageLog(at_step=interrupt, path=process.folder.with_suffix(".messages"))
    run = Run(recipe(process.changes), RunFolder(process.folder), log, resume=process.resume)
    if process.nan_update is not None:
        _put_nan_into_update(run, *process.nan_update)
    try:
        train(run)
    except RunStoppedError as error:
        log.message(f"stopped: {error}")
        sys.exit(STOPPED)
    except KeyboardInterrupt:
        sys.exit(-signal.SIGINT)
    except ValueError as error:
        log.message(f"refused: {error}")
        sys.exit(REFUSED)
    process.folder.with_suffix(".failpoints").write_text(json.dumps(failpoints.REACHED))


def _put_nan_into_update(run: Run, step: int, update: int) -> None:
    """Make one update of one step NaN, in every process that comes to it."""
    original, seen = loop.update, [(0, 0)]

    def with_nan(policy: Any, optimizer: Any, objective: Any, plan: Any, *rest: Any) -> Any:
        now = run.progress.step + 1
        count = seen[-1][1] + 1 if seen[-1][0] == now else 1
        seen.append((now, count))
        if (now, count) == (step, update):
            scale = plan.scale.clone()
            scale[0] = float("nan")
            plan = replace(plan, scale=scale)
        return original(policy, optimizer, objective, plan, *rest)

    loop.update = with_nan


def contents(folder: Path) -> dict[str, str]:
    """Return everything in a run's folder but the times, by file and by step: digests, and metrics as JSON."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if name == "metrics.jsonl":
            for record in RunFolder(folder).records():
                untimed = {key: value for key, value in record.items() if not key.startswith(("time/", "memory/"))}
                assert f"step {record['step']}" not in files, "a step was logged twice"
                files[f"step {record['step']}"] = json.dumps(untimed, sort_keys=True)
        else:
            files[name] = hashlib.sha256(_untimed(path)).hexdigest()
    return files


def _untimed(path: Path) -> bytes:
    """Return a file's bytes; in the record of a step with calls of tools, without the seconds that they took."""
    responses = path.parent / "responses.parquet"
    if path.name not in ("responses.parquet", "step.json") or "calls" not in pq.read_schema(responses).names:
        return path.read_bytes()
    if path.name == "step.json":
        info = json.loads(path.read_text())
        del info["sha256"], info["files"]["responses.parquet"]
        return json.dumps(info).encode()
    columns = pq.read_table(path).to_pydict()
    calls = [[call | {"seconds": 0} for call in json.loads(text or "[]")] for text in columns["calls"]]
    return json.dumps(columns | {"calls": calls}).encode()


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> Sequence[str]:
    """Return the names under which two runs differ."""
    return [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
