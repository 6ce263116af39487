"""The same run under several objectives and seeds. Each run is a process of its own; folders lie side by side, so runs
of one seed share their warm start, and what is finished already is not done again.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trimtab.config import Config, load
from trimtab.console import STOPPED, outcome, slug
from trimtab.text import clock, percent, printable
from trimtab.train import RunFolder, config_fingerprint

POLL = 0.2  # seconds between looks at the processes
TAIL = 1 << 16  # bytes of the metrics that hold their last lines

State = Literal["new", "cut off", "finished", "stopped", "failed"]


@dataclass(frozen=True)
class Comparison:
    """What is compared, as the user asked for it."""

    objectives: tuple[str, ...]
    out: Path
    recipe: str = "demo"
    seeds: int = 3
    settings: tuple[str, ...] = ()
    jobs: int = 1

    def command(self) -> list[str]:
        """The command line that makes this comparison."""
        words = ["trimtab", "compare", *self.objectives, "--seeds", str(self.seeds), "--recipe", self.recipe]
        for setting in self.settings:
            words += ["--set", setting]
        return [*words, "--out", str(self.out), *(["--jobs", str(self.jobs)] if self.jobs != 1 else [])]

    def settings_of(self, objective: str, seed: int) -> list[str]:
        """What one run sets over the recipe; the objective first, so that settings such as objective.scope reach it."""
        return [f"objective.name={objective}", *self.settings, f"run.seed={seed}"]


@dataclass(frozen=True)
class Job:
    """One run of a comparison."""

    comparison: Comparison
    objective: str
    seed: int
    config: Config

    @property
    def name(self) -> str:
        """The run folder's name."""
        return f"{slug(self.objective)}-seed{self.seed}"

    @property
    def folder(self) -> RunFolder:
        """Where the run is."""
        return RunFolder(self.comparison.out / self.name)

    @property
    def log(self) -> Path:
        """What the run printed."""
        return self.comparison.out / "logs" / f"{self.name}.log"

    def command(self) -> list[str]:
        """The process that runs it, or goes on with it."""
        words = [sys.executable, "-m", "trimtab", "train", self.comparison.recipe, "--quiet"]
        for setting in self.comparison.settings_of(self.objective, self.seed):
            words += ["--set", setting]
        begun = (self.folder.path / "config.toml").exists()
        return [*words, "--resume" if begun else "--out", str(self.folder.path)]

    def state(self) -> State:
        """How far the run has come, by its folder."""
        if not (self.folder.path / "config.toml").exists():
            return "new"
        done = self.last_step() >= self.config.run.steps and (self.folder.path / "model").is_dir()
        return "finished" if done else "cut off"

    def last_step(self) -> int:
        """The last step in the metrics, from the end of the file: this is looked at often while the run goes on."""
        try:
            with self.folder.metrics.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return 0
        return max((_step_of(line) for line in lines), default=0)

    def is_warm(self) -> bool:
        """Whether its warm start is behind it: a run's first checkpoint comes right after that."""
        return any(self.folder.checkpoints.glob("step-*"))


@dataclass
class Result:
    """What came of a job."""

    job: Job
    state: State
    why: str = ""

    @property
    def counts(self) -> bool:
        """Whether it belongs into means: a run that stopped for want of signal does, with what it reached."""
        return self.state in ("finished", "stopped")


def plan_jobs(comparison: Comparison) -> list[Job]:
    """Every run, checked before the first one starts."""
    if comparison.seeds < 1 or comparison.jobs < 1:
        raise ValueError("--seeds and --jobs are at least 1")
    names = [slug(name) for name in comparison.objectives]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is given twice: each objective once, seeds with --seeds")
    first = load(comparison.recipe, [f"objective.name={comparison.objectives[0]}", *comparison.settings]).run.seed
    jobs = [
        Job(comparison, objective, seed, load(comparison.recipe, comparison.settings_of(objective, seed)))
        for objective in comparison.objectives
        for seed in range(first, first + comparison.seeds)
    ]
    for job in jobs:
        _check_folder(job)
    return jobs


def _check_folder(job: Job) -> None:
    """A folder of another recipe must not slip into the table."""
    if job.state() == "new":
        return
    before, now = config_fingerprint(load(job.folder.path / "config.toml")), config_fingerprint(job.config)
    keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    differ = [f"{key}: {before.get(key)!r} -> {now.get(key)!r}" for key in keys]
    if job.last_step() > job.config.run.steps:
        differ.append(f"run.steps: {job.last_step()} are done already, {job.config.run.steps} are asked for")
    if differ:
        lines = "".join(f"\n  {line}" for line in differ)
        raise ValueError(f"{job.folder.path} holds a run of another recipe; choose another --out{lines}")


@dataclass
class Fleet:
    """The processes under way, `comparison.jobs` at a time."""

    jobs: list[Job]
    at_once: int
    say: Callable[[str], object]
    watch: Callable[[list[Job], list[Result]], object] = lambda running, results: None
    results: list[Result] = field(default_factory=list)
    running: dict[int, tuple[Job, subprocess.Popen[bytes], float]] = field(default_factory=dict)
    interrupts: int = 0

    @property
    def interrupted(self) -> bool:
        """Whether it was asked to stop."""
        return self.interrupts > 0

    def run(self) -> list[Result]:
        """Run all that is not finished; results in the order of the jobs. Ctrl-C lets the runs checkpoint and ends."""
        waiting = [job for job in self.jobs if job.state() != "finished"]
        for job in self.jobs:
            if job not in waiting:
                self._note(Result(job, "finished"), "already before")
        with _noted_signals(self._note_interrupt):
            try:
                while (waiting or self.running) and not self.interrupted:
                    self._start_what_may(waiting)
                    self._collect()
                    self.watch([job for job, _, _ in self.running.values()], self.results)
                    if self.running:
                        time.sleep(POLL)
                if self.interrupted:
                    self._interrupt()
            finally:
                self._end_all()
        order = {job.name: number for number, job in enumerate(self.jobs)}
        self.results += [Result(job, "cut off", "not run: interrupted") for job in waiting]
        return sorted(self.results, key=lambda result: order[result.job.name])

    def _start_what_may(self, waiting: list[Job]) -> None:
        for job in list(waiting):
            if len(self.running) < self.at_once and not self._must_wait(job) and not self.interrupted:
                waiting.remove(job)
                self._start(job)

    def _must_wait(self, job: Job) -> bool:
        """Two runs must not make the same warm start at the same time."""
        if not (job.config.warm_start.steps and job.config.warm_start.cache):
            return False
        return any(other.seed == job.seed and not other.is_warm() for other, _, _ in self.running.values())

    def _start(self, job: Job) -> None:
        job.log.parent.mkdir(parents=True, exist_ok=True)
        self.say(f"{job.name}: {'goes on' if job.state() == 'cut off' else 'starts'}")
        with job.log.open("ab") as log:
            process = subprocess.Popen(
                job.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(job),
                process_group=0,  # a Ctrl-C of the terminal reaches it through us, once
            )
        self.running[process.pid] = (job, process, time.monotonic())

    def _environment(self, job: Job) -> dict[str, str]:
        """Several runs at once share the cores instead of fighting over them."""
        environment = dict(os.environ)
        if self.at_once > 1 and not job.config.run.threads:
            environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // self.at_once))
        return environment

    def _collect(self) -> None:
        for pid, (job, process, began) in list(self.running.items()):
            code = process.poll()
            if code is None:
                continue
            del self.running[pid]
            self._note(_result(job, code), f"{clock(time.monotonic() - began)}")

    def _note(self, result: Result, words: str) -> None:
        self.results.append(result)
        number = f"[{len(self.results)}/{len(self.jobs)}] {result.job.name}"
        if result.counts:
            ran = outcome(result.job.folder.records())
            accuracy = f"held-out {percent(ran.accuracy_start)} -> {percent(ran.accuracy_end)}"
            self.say(f"{number}: {result.state}, {words}, {accuracy}" + (f" ({result.why})" if result.why else ""))
        else:
            self.say(f"{number}: {result.state}: {result.why} (log: {result.job.log})")

    def _interrupt(self) -> None:
        """Pass the Ctrl-C on and wait for the checkpoints, or for another Ctrl-C."""
        self.say("stopping: every run finishes its step and leaves a checkpoint; Ctrl-C again to stop at once")
        self._collect()
        for _, process, _ in self.running.values():
            process.send_signal(signal.SIGINT)
        while self.running and self.interrupts == 1:
            time.sleep(POLL)
            for pid, (job, process, _) in list(self.running.items()):
                if process.poll() is not None:
                    del self.running[pid]
                    self.results.append(Result(job, job.state(), "interrupted"))

    def _note_interrupt(self, number: int, frame: Any) -> None:
        self.interrupts += 1

    def _end_all(self) -> None:
        """Nothing outlives the comparison."""
        for job, process, _ in self.running.values():
            process.kill()
            process.wait()
            self.results.append(Result(job, "cut off", "stopped at once"))
        self.running = {}


@contextmanager
def _noted_signals(note: Callable[[int, Any], object]) -> Iterator[None]:
    """Have Ctrl-C, a polite kill and a closed terminal noted; afterwards they do what they did before.

    An exception instead could come while a process is started, which then nobody would know of. What is ignored, as
    by `nohup` or in the background, stays so; Ctrl-C by a handler, for the runs would inherit that they ignore it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    heard = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    if signal.SIGINT not in heard:
        signal.signal(signal.SIGINT, lambda number, frame: None)
    for number in heard:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _result(job: Job, code: int) -> Result:
    if code == 0:
        return Result(job, "finished")
    if code < 0:
        return Result(job, "failed", f"killed by {signal.Signals(-code).name}")
    why = _last_words(job.log)
    return Result(job, "stopped" if code == STOPPED and job.folder.records() else "failed", why or f"exit code {code}")


def _last_words(log: Path) -> str:
    """What a run said when it failed: its error in full on one line."""
    lines = printable(log.read_text(encoding="utf-8", errors="replace")).splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("trimtab: ")]
    if starts:
        words = [lines[starts[-1]].removeprefix("trimtab: ")]
        for line in lines[starts[-1] + 1 :]:
            if not line.strip():
                break
            words.append(line.strip())
        return "; ".join(words)
    full = [line.strip() for line in lines if line.strip()]
    return full[-1] if full else ""


def _step_of(line: str) -> int:
    """The step of a line of metrics; 0 where the line is cut off."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return 0


def plain_numbers(value: Any) -> Any:
    """Numbers JSON can hold: what is not finite is null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: plain_numbers(item) for key, item in value.items()}
    return [plain_numbers(item) for item in value] if isinstance(value, list | tuple) else value


def objectives_of(jobs: Sequence[Job]) -> list[str]:
    """The objectives in the order they were given."""
    return list(dict.fromkeys(job.objective for job in jobs))
