"""Runs per second, latency and memory of the sandbox, beside bubblewrap; and what ten thousand runs leave behind.

python benchmarks/sandbox.py --out benchmarks/results/sandbox-cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from result_file import about, save
from trimtab.workers import Sandbox
from trimtab.workers.bubblewrap import find_bubblewrap, show_files
from trimtab.workers.sandbox_client import SandboxClient
from trimtab.workers.visible_files import find_visible_files

ROUNDS = 20
TINY = "print(1 + 1)"
MATHS = "import numpy as np, sympy\nprint(np.arange(9).sum(), sympy.factorint(360))"


Run = Callable[[str], object]


def plain_bubblewrap() -> Run:
    """The least to ask of bubblewrap: namespaces, mounts and a fresh interpreter; no seccomp, no landlock."""
    command = [find_bubblewrap(), "--unshare-all", "--die-with-parent", "--clearenv", "--tmpfs", "/tmp"]
    command += [*show_files(find_visible_files(["numpy", "sympy"])), sys.executable, "-I", "-c"]
    return lambda code: subprocess.run([*command, code], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True)


@dataclass
class Measured:
    """Runs of one backend: how many at once and each round, the milliseconds of each, and the seconds of all."""

    run: Run
    each_round: int
    threads: int = 1
    times: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def measure(self, code: str, count: int) -> None:
        """Run a program so many times, from several threads if so asked."""
        with ThreadPoolExecutor(self.threads) as pool:
            start = time.perf_counter()
            self.times += pool.map(self.time_one, [code] * count)
            self.seconds += time.perf_counter() - start

    def time_one(self, code: str) -> float:
        """Milliseconds of one run, as the caller sees them."""
        before = time.perf_counter()
        self.run(code)
        return 1e3 * (time.perf_counter() - before)

    def figures(self) -> dict[str, float]:
        """What is written down."""
        return {
            "runs": len(self.times),
            "median_ms": round(median(self.times), 2),
            "p90_ms": round(quantiles(self.times, n=10)[-1], 2),
            "runs_per_second": round(len(self.times) / self.seconds, 1),
        }


def side_by_side(code: str, sandbox: Measured, bubblewrap: Measured) -> dict[str, Any]:
    """Both in turn, round by round, so that what else the machine does is the same for both."""
    for measured in (sandbox, bubblewrap):
        measured.run(code)
    for _ in range(ROUNDS):
        for measured in (sandbox, bubblewrap):
            measured.measure(code, measured.each_round)
    both = {"sandbox": sandbox.figures(), "bubblewrap": bubblewrap.figures()}
    times = both["sandbox"]["runs_per_second"] / both["bubblewrap"]["runs_per_second"]
    return {"threads": sandbox.threads, **both, "times_bubblewrap": round(times, 2)}


def descendants(pid: int) -> list[int]:
    """All processes below one."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [below for child in map(int, text.split()) for below in (child, *descendants(child))]


def memory_kb(pid: int, field: str) -> int:
    """A field of a process's memory."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def memory(sandbox: Sandbox) -> dict[str, float]:
    """Megabytes of the server, and of a session beyond what it shares with it."""
    server = sandbox.server()
    assert isinstance(server, SandboxClient)
    with sandbox.session() as session:
        session.run("x = 1")
        fork_server, *workers = descendants(server.process.pid)
        own = max(memory_kb(pid, "Private_Dirty") for pid in workers)
        return {"server_rss_mb": round(memory_kb(fork_server, "Rss") / 1024, 1), "worker_own_mb": round(own / 1024, 1)}


def resources(pid: int) -> dict[str, int]:
    """What must not grow: of this process and of the server's."""
    (fork_server, *_) = descendants(pid)
    return {
        "client_rss_kb": memory_kb(os.getpid(), "Rss"),
        "server_rss_kb": memory_kb(fork_server, "Rss"),
        "client_descriptors": len(os.listdir("/proc/self/fd")),
        "server_descriptors": len(os.listdir(f"/proc/{fork_server}/fd")),
        "processes": len(descendants(pid)),
    }


def soak(sandbox: Sandbox, count: int) -> dict[str, Any]:
    """Resources before and after many runs in a row."""
    server = sandbox.server()
    assert isinstance(server, SandboxClient)
    for _ in range(200):  # until allocators and caches have what they need
        sandbox.run(TINY)
    time.sleep(1.0)
    before = resources(server.process.pid)
    for _ in range(count):
        assert sandbox.run(TINY).stdout == "2\n"
    time.sleep(1.0)
    return {"runs": count, "before": before, "after": resources(server.process.pid)}


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=600, help="0: leave the figures of an earlier result as they are")
    parser.add_argument("--soak", type=int, default=10_000, help="0: the same for the runs in a row")
    options = parser.parse_args()
    workers = os.cpu_count() or 1
    result: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    with Sandbox(workers=workers) as sandbox:
        if options.runs:
            result |= head(sandbox, workers) | figures(sandbox, options.runs, workers)
        if options.soak:
            result["soak"] = {"load_before": round(os.getloadavg()[0], 1)} | soak(sandbox, options.soak)
    save(result, options.out)
    print(json.dumps(result, indent=1))


def head(sandbox: Sandbox, workers: int) -> dict[str, Any]:
    """The head of the result."""
    assert sandbox.probe is not None
    policy = {os.SCHED_FIFO: "real-time (chrt -f)"}.get(os.sched_getscheduler(0), "normal")
    return {
        **about("the sandbox with all layers, and bubblewrap's namespaces with a fresh interpreter"),
        "machine": f"{platform.machine()}, {workers} cores, Linux {platform.release().split('-')[0]}",
        "priority_of_both": policy,
        "probe": sandbox.probe.line(),
    }


def figures(sandbox: Sandbox, runs: int, workers: int) -> dict[str, Any]:
    """Latencies and runs per second of both, and the memory of ours."""
    ours, theirs, each = sandbox.run, plain_bubblewrap(), runs // ROUNDS
    return {
        "rounds": ROUNDS,
        "tiny": side_by_side(TINY, Measured(ours, each), Measured(theirs, each // 3)),
        "tiny_from_threads": side_by_side(TINY, Measured(ours, each, workers), Measured(theirs, each // 3, workers)),
        "numpy_and_sympy": side_by_side(MATHS, Measured(ours, each), Measured(theirs, 1)),
        "memory": memory(sandbox),
    }


if __name__ == "__main__":
    main()
