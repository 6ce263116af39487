"""Run the processes of a grid, so many at a time, and stop them when this process is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from trimtab.experiments.grid.plan import GridRun, RunOutcome
from trimtab.process import STOP_AT_INPUT_END, StopRequest, deferred_stop
from trimtab.text import PrintLine, clock, percent, printable
from trimtab.trainer.train import STOPPED, summarize_metrics

POLL = 0.2  # seconds between looks at the processes

Watch = Callable[[list[GridRun], list[RunOutcome]], object]


@dataclass
class ProcessPool:
    """Runs `at_once` runs at a time, each in its own process; `watch` gets those running and the outcomes so far.

    `end_early` returns why a run needs no further step, and stops it; `on_end` gets the outcome of every run that ends.
    """

    # One thread polls all processes. A thread pool around `subprocess.run` is no shorter: Ctrl-C would have to reach
    # processes that other threads are about to start, and a run that waits for a warm start would hold a thread.
    # A process per run, not a worker pool: a run that crashes or is killed must not take others with it, and CUDA does
    # not give all memory back while its process lives.

    runs: list[GridRun]
    at_once: int
    print_line: PrintLine
    watch: Watch = lambda running, outcomes: None
    end_early: Callable[[GridRun], str] = lambda run: ""
    on_end: Callable[[RunOutcome], object] = lambda outcome: None
    outcomes: list[RunOutcome] = field(default_factory=list)
    stop_request: StopRequest = field(default_factory=StopRequest)
    _running: list[tuple[GridRun, subprocess.Popen[bytes], float]] = field(default_factory=list)
    _ended_early: dict[str, str] = field(default_factory=dict)
    _stopping: bool = False

    def run(self) -> list[RunOutcome]:
        """Run all that is not finished; return the outcomes in the order of the runs.

        A stop signal lets every run finish its step and write a checkpoint; a second one kills them.
        """
        waiting = [run for run in self.runs if run.state() != "finished"]
        for run in self.runs:
            if run not in waiting:
                self._report(RunOutcome(run, "finished"), "already before")
        # No exception at the second signal: it could be raised inside Popen and leave a process nobody knows of.
        with deferred_stop(lambda number: None, interrupt=False) as self.stop_request:
            try:
                while self._running or (waiting and not self.stop_request):
                    self._start_runs(waiting)
                    self._collect()
                    self._end_early()
                    self.watch([run for run, _, _ in self._running], self.outcomes)
                    if self.stop_request:
                        self._stop_runs()
                    if self._running:
                        time.sleep(POLL)
            finally:  # after an error here the runs stop well too, and no process may be left behind
                self._close_inputs()
                while any(process.poll() is None for _, process, _ in self._running) and not self.stop_request.again:
                    time.sleep(POLL)
                self._kill_runs()
        self.outcomes += [RunOutcome(run, "unfinished", "not run: interrupted") for run in waiting]
        order = {run.name: number for number, run in enumerate(self.runs)}
        return sorted(self.outcomes, key=lambda outcome: order[outcome.run.name])

    def _start_runs(self, waiting: list[GridRun]) -> None:
        for run in list(waiting):
            if len(self._running) < self.at_once and not self._must_wait(run) and not self.stop_request:
                waiting.remove(run)
                self._start(run)

    def _must_wait(self, run: GridRun) -> bool:
        """Return whether another process is making this run's warm start, which both would otherwise compute."""
        if not (run.config.warm_start.steps and run.config.warm_start.cache):
            return False
        return any(other.seed == run.seed and not other.is_warm() for other, _, _ in self._running)

    def _start(self, run: GridRun) -> None:
        run.log.parent.mkdir(parents=True, exist_ok=True)
        for path in (run.log.parent, run.log):
            if path.is_symlink():
                raise ValueError(f"{path} is a link, and the output of runs is written there: remove it")
        if run.log.exists() and not run.log.is_file():  # opening a named pipe would block
            raise ValueError(f"{run.log} is not a regular file: remove it")
        self.print_line(f"{run.name}: {'resumes' if run.state() == 'unfinished' else 'starts'}")
        # Each run is by itself, also where torchrun has started this process.
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        environment[STOP_AT_INPUT_END] = "1"
        if self.at_once > 1 and not run.config.run.threads:  # else each run would take all cores
            environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // self.at_once))
        with run.log.open("ab") as log:  # appended to, so that the log of a resumed run keeps its beginning
            # In its own group: else the terminal's second Ctrl-C would reach the run directly. The pipe is closed
            # to stop the run, and by the kernel if this process is killed.
            process = subprocess.Popen(
                run.command(), stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, process_group=0
            )
        self._running.append((run, process, time.monotonic()))

    def _end_early(self) -> None:
        for run, process, _ in self._running:
            if run.name not in self._ended_early and (why := self.end_early(run)):
                self._ended_early[run.name] = why
                _close_input(process)

    def _collect(self) -> None:
        """Take the processes that have ended off the list."""
        for entry in [entry for entry in self._running if entry[1].poll() is not None]:
            run, process, began = entry
            self._running.remove(entry)
            _close_input(process)
            early = process.returncode >= 0 and self._ended_early.get(run.name)
            if self._stopping and not early:
                self.outcomes.append(RunOutcome(run, run.state(), "interrupted"))
            else:
                outcome = RunOutcome(run, "stopped", early) if early else _outcome(run, process.returncode)
                self._report(outcome, clock(time.monotonic() - began))

    def _report(self, outcome: RunOutcome, note: str) -> None:
        self.outcomes.append(outcome)
        number = f"[{len(self.outcomes)}/{len(self.runs)}] {outcome.run.name}"
        if outcome.counts:
            summary = summarize_metrics(outcome.run.folder.records(self.print_line))
            accuracy = f"held-out {percent(summary.accuracy_start)} -> {percent(summary.accuracy_end)}"
            if summary.score_start is not None and summary.score_end is not None:
                accuracy += f", score {summary.score_start:.3f} -> {summary.score_end:.3f}"
            why = f" ({outcome.why})" if outcome.why else ""
            self.print_line(f"{number}: {outcome.state}, {note}, {accuracy}{why}")
        else:
            self.print_line(f"{number}: {outcome.state}: {outcome.why} (log: {outcome.run.log})")
        self.on_end(outcome)

    def _stop_runs(self) -> None:
        """Stop the runs at the first signal; kill them at the second."""
        if self.stop_request.again:
            self._kill_runs()
        elif not self._stopping:
            self._stopping = True
            then = "every run finishes its step and leaves a checkpoint; a second signal stops them at once"
            self.print_line(f"stopping: {then}")
            self._close_inputs()

    def _close_inputs(self) -> None:
        for _, process, _ in self._running:
            _close_input(process)

    def _kill_runs(self) -> None:
        for run, process, _ in self._running:
            process.kill()
            process.wait()
            _close_input(process)
            self.outcomes.append(RunOutcome(run, "unfinished", "stopped at once"))
        self._running = []


def _close_input(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()


def _outcome(run: GridRun, code: int) -> RunOutcome:
    """Return the outcome of a process that ended with this exit code."""
    if code == 0:
        return RunOutcome(run, "finished")
    if code < 0:
        return RunOutcome(run, "failed", f"killed by {signal.Signals(-code).name}")
    stopped = code == STOPPED and run.folder.records()  # without metrics there is nothing to put into the means
    return RunOutcome(run, "stopped" if stopped else "failed", _error_in(run.log) or f"exit code {code}")


def _error_in(log: Path) -> str:
    """Return the last error of a log on one line: the paragraph after `trimtab: `, else the last line."""
    # Below the error there may be warnings of libraries, set apart by an empty line.
    text = printable(log.read_text(encoding="utf-8", errors="replace")).strip()
    _, found, error = f"\n{text}".rpartition("\ntrimtab: ")
    lines = error.partition("\n\n")[0].splitlines() if found else text.splitlines()[-1:]
    return "; ".join(line.strip() for line in lines)
