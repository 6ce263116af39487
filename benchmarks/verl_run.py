"""One run of verl: followed through its log, stopped at a step or a limit, and killed with all its processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

# A line of the log that shows how far a run has come. All of it happens one after the other.
STAGES: Mapping[str, re.Pattern[str]] = {
    "Ray is up": re.compile("Started a local Ray instance"),
    "trainer built": re.compile("train and validate dataloader initialized"),
    "workers built": re.compile("actor and ref model engine initialized"),
    "vLLM's server started": re.compile("vLLMHttpServer, replica_rank"),
    "vLLM ready": re.compile("checkpoint engine manager initialized"),
    "ready to train": re.compile("all initialize finished, ready to fit"),
    "first step done": re.compile(r"\bstep:\d+ - "),
}
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
NOISE = re.compile(r"\d+%\|| examples/s\]|it/s\]|[\^~]{4,}$")  # progress bars, and what underlines code in tracebacks
LINE, TAIL = 300, 3000  # characters kept of a line (a step's metrics have thousands) and of the log


class Log:
    """The lines of a process as they arrive, each with the seconds since the start, without noise."""

    def __init__(self, output: IO[str]) -> None:
        self.lines: list[str] = []
        self.stages: dict[str, float] = {}
        self._start, self._output = time.monotonic(), output
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self._output:
            for line in self._output:
                text = COLOUR.sub("", line).rstrip()
                if not text.strip() or NOISE.search(text):
                    continue
                now = round(time.monotonic() - self._start, 1)
                self.lines.append(f"{now:6.1f} {text[:LINE]}")
                for stage, pattern in STAGES.items():
                    if stage not in self.stages and pattern.search(text):
                        self.stages[stage] = now

    def tail(self) -> str:
        """Return the end of the log, when the process has ended."""
        self._reader.join(timeout=5)  # longer only if a process outlived the kill and holds the pipe
        return "\n".join(self.lines)[-TAIL:]


def logged(metrics: Path) -> list[dict[str, float]]:
    """Return the metrics of every step so far, from the file of verl's logger."""
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    return [json.loads(line)["data"] for line in lines if line.endswith("\n")]


def processes_in(folder: Path) -> list[int]:
    """Return the processes that work in a folder: those of a run, also in sessions of their own or orphaned."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").readlink() == folder.resolve():
                found.append(int(entry.name))
        except OSError:  # it has ended meanwhile, or is another user's
            continue
    return [pid for pid in found if pid != os.getpid()]


def kill_all(folder: Path, seconds: float = 30) -> int:
    """Kill every process that works in a folder and wait until none is left; return how many there were.

    They all inherit the folder from the driver, whatever group or session they are in. An engine of vLLM that is left
    would hold the GPU's memory while the next run starts.
    """
    deadline, killed = time.monotonic() + seconds, set[int]()
    while (left := processes_in(folder)) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        killed.update(left)
        time.sleep(0.1)  # until the kernel has removed them; one that was just starting is seen at the next look
    return len(killed)


def run(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], metrics: Path, kill_after: int | None,
    seconds: float,
) -> dict[str, Any]:  # fmt: skip
    """Run a command in a folder to its end, or kill it when it has logged `kill_after` steps or after `seconds`.

    The end of its log is the `error` of a run that did not get so far. verl logs a step after its checkpoint.
    """
    start = time.monotonic()
    process = subprocess.Popen(
        command, cwd=folder, env=environment, text=True, errors="replace", start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    log = Log(process.stdout)

    def reached() -> bool:
        return kill_after is not None and len(logged(metrics)) >= kill_after

    while process.poll() is None and not reached() and time.monotonic() - start < seconds:
        time.sleep(0.2)  # until the next look at the steps
    code, taken = process.poll(), round(time.monotonic() - start, 1)
    killed = kill_all(folder)
    process.wait()
    tail = log.tail()
    result: dict[str, Any] = {"exit_code": code, "seconds": taken, "stages": log.stages, "processes_killed": killed}
    if code != 0 if kill_after is None else not reached():
        why = f"exit code {code}" if code is not None else f"cut after {taken} s"
        result["error"] = f"{why}; its last words:\n{tail}"
    return result
