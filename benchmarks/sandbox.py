"""Runs per second, latency and memory of the sandbox, beside bubblewrap; and what ten thousand runs leave behind.

python benchmarks/sandbox.py --out benchmarks/results/sandbox-cpu.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import trimtab
from trimtab.tools import Sandbox
from trimtab.tools.bubblewrap import find_bubblewrap
from trimtab.tools.fork_backend import ForkServer
from trimtab.tools.visible_files import DEVICES, find_visible_files

TINY = "print(1 + 1)"
MATHS = "import numpy as np, sympy\nprint(np.arange(9).sum(), sympy.factorint(360))"


def plain_bubblewrap() -> list[str]:
    """The least to ask of bubblewrap: namespaces, mounts and a fresh interpreter; no seccomp, no landlock."""
    files = find_visible_files(["numpy", "sympy"])
    command = [find_bubblewrap(), "--unshare-all", "--die-with-parent", "--clearenv"]
    for path in sorted({*files.paths, *files.hidden}):
        command += ["--tmpfs", path] if path in files.hidden else ["--ro-bind", path, path]
    for link, target in files.links.items():
        command += ["--symlink", target, link]
    for device in DEVICES:
        command += ["--dev-bind", device, device]
    return [*command, "--tmpfs", "/tmp", sys.executable, "-I", "-c"]


def latencies(run: Callable[[str], object], code: str, count: int) -> dict[str, float]:
    """Milliseconds of runs one after another, as the caller sees them, and runs per second."""
    run(code)
    times = []
    start = time.perf_counter()
    for _ in range(count):
        before = time.perf_counter()
        run(code)
        times.append(1e3 * (time.perf_counter() - before))
    seconds = time.perf_counter() - start
    return {
        "runs": count,
        "median_ms": round(median(times), 2),
        "p90_ms": round(quantiles(times, n=10)[-1], 2),
        "runs_per_second": round(count / seconds, 1),
    }


def at_once(run: Callable[[str], object], code: str, count: int, workers: int) -> float:
    """Runs per second from several threads."""
    with ThreadPoolExecutor(workers) as pool:
        start = time.perf_counter()
        list(pool.map(run, [code] * count))
        return round(count / (time.perf_counter() - start), 1)


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
    assert isinstance(server, ForkServer)
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
    assert isinstance(server, ForkServer)
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
    parser.add_argument("--runs", type=int, default=300, help="0: leave the figures of an earlier result as they are")
    parser.add_argument("--soak", type=int, default=10_000, help="0: the same for the runs in a row")
    options = parser.parse_args()
    wrap = plain_bubblewrap()

    def bubblewrap(code: str) -> None:
        subprocess.run([*wrap, code], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True)

    workers = os.cpu_count() or 1
    result: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    with Sandbox(workers=workers) as sandbox:
        if options.runs:
            result |= about(sandbox, workers) | figures(sandbox, bubblewrap, options.runs, workers)
        if options.soak:
            result["soak"] = {"load_before": round(os.getloadavg()[0], 1)} | soak(sandbox, options.soak)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def about(sandbox: Sandbox, workers: int) -> dict[str, Any]:
    """The head of the result."""
    assert sandbox.probe is not None
    policy = {os.SCHED_FIFO: "real-time (chrt -f)"}.get(os.sched_getscheduler(0), "normal")
    return {
        "what": "the sandbox with all layers, and bubblewrap's namespaces with a fresh interpreter",
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {workers} cores, Linux {platform.release().split('-')[0]}",
        "load_before": round(os.getloadavg()[0], 1),
        "priority_of_both": policy,
        "versions": {"python": platform.python_version(), "trimtab": trimtab.__version__},
        "probe": sandbox.probe.line(),
    }


def figures(sandbox: Sandbox, bubblewrap: Callable[[str], object], runs: int, workers: int) -> dict[str, Any]:
    """Latencies and runs per second of both, and the memory of ours."""
    tiny = {"sandbox": latencies(sandbox.run, TINY, runs), "bubblewrap": latencies(bubblewrap, TINY, runs // 3)}
    return {
        "tiny": tiny,
        "times_bubblewrap": round(tiny["sandbox"]["runs_per_second"] / tiny["bubblewrap"]["runs_per_second"], 2),
        "numpy_and_sympy": {
            "sandbox": latencies(sandbox.run, MATHS, runs // 3),
            "bubblewrap": latencies(bubblewrap, MATHS, 10),
        },
        "runs_per_second_from_threads": {
            "threads": workers,
            "sandbox": at_once(sandbox.run, TINY, runs, workers),
            "bubblewrap": at_once(bubblewrap, TINY, runs // 3, workers),
        },
        "memory": memory(sandbox),
    }


if __name__ == "__main__":
    main()
