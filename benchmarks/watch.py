"""How soon `trimtab watch` shows a run of 20,000 steps, how soon a new line is seen, and what it takes from a run.

The cost to a run is CPU time, which does not depend on what else the machine does: that of the page's server while the
demo trains, divided by that of the training process in the same seconds. `--out` writes the JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
from playwright.sync_api import Page, sync_playwright

from report import CHROMIUM, FLAGS, write_metrics
from result_file import about, added_to, save

TRIMTAB = [sys.executable, "-P", "-m", "trimtab"]
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+/\?token=\S+")
DRAWN = "#curves svg.chart path.line"
FRAMES = """(seconds) => new Promise((done) => {
  const gaps = []; let last = performance.now(); const first = last;
  const frame = (now) => { gaps.push(now - last); last = now;
    window.scrollBy(0, Math.sin(now / 300) * 40);
    if (now - first < 1000 * seconds) requestAnimationFrame(frame); else done(gaps.slice(1)); };
  requestAnimationFrame(frame);
})"""
PATIENCE = 300_000  # milliseconds, on a loaded machine
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(process: int) -> float:
    """CPU seconds of a process and all of its threads so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def megabytes(process: int) -> float:
    """Most memory that a process has taken so far."""
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
    return int(found[1]) / 1000 if found else 0.0


@contextmanager
def served(run: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of a server of `trimtab watch`, and its process."""
    process = subprocess.Popen([*TRIMTAB, "watch", str(run)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = next(match[0] for line in process.stdout if (match := ADDRESS.search(line)))
        yield found, process
    finally:
        process.terminate()
        process.wait()


def children(process: int) -> list[int]:
    """The processes that a process, or a thread of it, has started."""
    files = Path(f"/proc/{process}/task").glob("*/children")
    return [int(each) for file in files for each in file.read_text().split()]


def chromium() -> list[int]:
    """The processes of the browser that this process has started."""
    found, asked = list[int](), children(os.getpid())
    while asked:
        each = asked.pop()
        name = Path(f"/proc/{each}/comm").read_text().strip()
        found += [each] if name.startswith("chrom") else []
        asked += children(each)
    return found


def answered(address: str) -> None:
    """Wait until a server answers."""
    while True:
        try:
            httpx.get(address, timeout=60)
            return
        except httpx.TransportError:
            time.sleep(0.05)


def opened(page: Page, address: str) -> dict[str, float]:
    """Open a page; return milliseconds until something is painted, and until the curves are there."""
    page.goto(address, wait_until="commit")
    page.wait_for_selector(DRAWN)
    drawn = page.evaluate(
        "new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(performance.now()))))"
    )
    painted = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? performance.now()")
    return {"first_paint_ms": painted, "curves_ms": drawn}


def append(run: Path, step: int, names: list[str]) -> None:
    """Write the line of a step, as a run does."""
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, **dict.fromkeys(names, 0.5)}) + "\n")


def long_run(steps: int, rounds: int) -> dict[str, Any]:
    """What opening a long run takes, and how its page behaves while the run goes on."""
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        run = Path(temporary) / "run"
        run.mkdir()
        write_metrics(run, steps, np.random.default_rng(0))
        (run / "config.toml").write_text(f'[objective]\nname = "stapo"\n\n[run]\nsteps = {2 * steps}\n')
        names = [name for name in json.loads((run / "metrics.jsonl").open().readline()) if name != "step"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        starts, openings, delays, gaps = list[float](), list[dict[str, float]](), list[float](), list[float]()
        cpu = list[tuple[float, float]]()
        memory = 0.0
        step = steps
        for _ in range(rounds):
            began = time.perf_counter()
            with served(run) as (address, process):
                answered(address)
                starts.append(time.perf_counter() - began)
                page = browser.new_page(viewport={"width": 1280, "height": 900})
                page.set_default_timeout(PATIENCE)
                before = cpu_seconds(process.pid), sum(map(cpu_seconds, chromium()))
                openings.append(opened(page, address))
                cpu.append((cpu_seconds(process.pid) - before[0], sum(map(cpu_seconds, chromium())) - before[1]))
                page.wait_for_timeout(1_000)  # the stream is open
                for _ in range(5):
                    step += 1
                    began = time.perf_counter()
                    append(run, step, names)
                    page.wait_for_function(
                        "(step) => document.title.includes('step ' + step.toLocaleString('en'))", arg=step
                    )
                    delays.append(time.perf_counter() - began)
                gaps += page.evaluate(FRAMES, 3)
                memory = max(memory, megabytes(process.pid))
                page.close()
        browser.close()
    return {
        "steps": steps,
        "metrics": len(names),
        "rounds": rounds,
        "server_ready_seconds": round(median(starts), 1),
        "first_paint_ms": round(median(each["first_paint_ms"] for each in openings)),
        "curves_ms": round(median(each["curves_ms"] for each in openings)),
        "curves_ms_most": round(max(each["curves_ms"] for each in openings)),
        "opening_server_cpu_seconds": round(median(server for server, _ in cpu), 2),
        "opening_browser_cpu_seconds": round(median(browser for _, browser in cpu), 2),
        "new_line_seconds": round(median(delays), 2),
        "new_line_seconds_most": round(max(delays), 2),
        "frame_ms_median": round(median(gaps), 1),
        "frame_ms_p95": round(float(np.quantile(gaps, 0.95)), 1),
        "server_megabytes": round(memory),
    }


def watch_process(train: int) -> int:
    """The server that a training process has started."""
    while True:
        for each in children(train):
            if b"watch" in Path(f"/proc/{each}/cmdline").read_bytes().split(b"\0"):
                return each
        time.sleep(0.1)


def beside(steps: int, seconds: float, look: bool) -> dict[str, float]:
    """CPU seconds of a run and of the server beside it, from its 20th step on, for so many seconds."""
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        run = Path(temporary) / "run"
        settings = ["--set", f"run.steps={steps}", "--set", "run.report=false"]
        command = [*TRIMTAB, "train", "--watch", "--quiet", "--out", str(run), *settings]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            address = next(match[0] for line in process.stdout if (match := ADDRESS.search(line)))
            server = watch_process(process.pid)
            metrics = run / "metrics.jsonl"
            while not metrics.exists() or len(metrics.read_text().splitlines()) < 20:
                time.sleep(0.2)
            before_open = cpu_seconds(server)
            if look:
                browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
                page = browser.new_page(viewport={"width": 1280, "height": 900})
                page.set_default_timeout(PATIENCE)
                opened(page, address)
                page.wait_for_timeout(10_000)
            first = (cpu_seconds(process.pid), cpu_seconds(server), len(metrics.read_text().splitlines()))
            time.sleep(seconds)
            last = (cpu_seconds(process.pid), cpu_seconds(server), len(metrics.read_text().splitlines()))
            if look:
                browser.close()
        finally:
            process.terminate()
            process.wait()
    train, watch, taken = (b - a for a, b in zip(first, last, strict=True))
    return {
        "share": watch / train,
        "steps": taken,
        "train_cpu_seconds": train,
        "watch_cpu_seconds": watch,
        "opening_cpu_seconds": first[1] - before_open,
        "start_cpu_seconds": before_open,
    }


def cost(rounds: int, seconds: float) -> dict[str, Any]:
    """What the server takes from a run while nobody looks, and while a page is open."""
    found: dict[str, Any] = {"recipe": "demo", "seconds": seconds, "rounds": rounds}
    for name, look in (("nobody_looks", False), ("page_open", True)):
        each = [beside(100_000, seconds, look) for _ in range(rounds)]
        found[name] = {key: round(median(one[key] for one in each), 4) for key in each[0]}
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", choices=["long_run", "cost"], help="only this one; the other is kept from last time")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each round of the cost to a run")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if not shutil.which("chromium"):
        parser.error("this needs Chromium, see `make chromium`")
    head = about("trimtab watch of a made run, and beside the demo")
    head |= {"machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    result = added_to(given.out, head) if given.out else head
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "long_run": lambda: long_run(given.steps, given.rounds),
        "cost": lambda: cost(given.rounds, given.seconds),
    }
    for name, measure in parts.items():
        if given.part not in (None, name):
            continue
        result[name] = measure() | {"load": round(os.getloadavg()[0], 1)}
        print(json.dumps(result[name], indent=1), flush=True)
        if given.out:
            save(result, given.out)


if __name__ == "__main__":
    main()
