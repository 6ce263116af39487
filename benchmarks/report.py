"""How long a report of a large run takes, how big it is, and how soon it is on the screen.

A run of 10,000 steps and 50 million tokens is made with the recorder's own writer: some dozens of different steps, over
and over, with texts, plans and metrics as a real run has them. `--out` writes the JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from result_file import about, save
from trimtab.objectives import TokenBatch, objective, segment_ids, theory
from trimtab.record import Manifest, RecordSettings, RecordWriter, StepData, StepInfo, UpdateInfo, Vocabulary

OBJECTIVE = {"name": "stapo", "tau_p": 0.002}
VOCABULARY = 2_000
LONG = 15_000  # tokens of one response
TEMPLATES = 40
CHROMIUM = "/usr/bin/chromium"
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


def words(rng: np.random.Generator) -> Vocabulary:
    """Pseudo-words of two to seven letters, and what ends a clause."""
    letters = np.array(list("etaoinshrdlucmfwypvbgk"))
    made = ["".join([" ", *rng.choice(letters, rng.integers(2, 8))]) for _ in range(VOCABULARY - 6)]
    texts = ["<end>", ".", ",", "\n", " =", " 7", *made]
    return Vocabulary([text.encode() for text in texts], [n == 0 for n in range(len(texts))])


def make_step(rng: np.random.Generator, lengths: list[int], spelling: Mapping[int, bytes]) -> StepData:
    """A step whose tokens come from real distributions, planned by the real objective."""
    count, tokens = len(lengths), sum(lengths)
    sharpness = rng.gamma(2.0, 1.6, tokens).astype(np.float32)[:, None]
    logits = torch.from_numpy(rng.standard_normal((tokens, 64), dtype=np.float32) * sharpness)
    drawn = torch.distributions.Categorical(logits=logits).sample()
    moments = theory.moments(logits, drawn)
    ids = torch.from_numpy(rng.integers(1, VOCABULARY, tokens))
    sequence = torch.repeat_interleave(torch.arange(count), torch.tensor(lengths))
    group, reward = torch.arange(count) // 8, torch.from_numpy(rng.integers(0, 2, count).astype(np.float32))
    method = objective(**OBJECTIVE)  # type: ignore[arg-type]
    batch = TokenBatch(
        old_logp=moments.logp, entropy=moments.entropy, sum_p2=moments.sum_p2, sum_p2_logp=moments.sum_p2_logp,
        advantage=method.advantages(reward, group)[sequence], sequence=sequence, group=group, reward=reward,
        responses=count,
    )  # fmt: skip
    plan = method.plan(batch)
    new = batch.old_logp + 0.1 * torch.from_numpy(rng.standard_normal(tokens, dtype=np.float32))
    clipped = method.loss(new, plan).clipped
    table = {
        "response": sequence, "token": ids, "old_logp": batch.old_logp, "new_logp": new, "entropy": batch.entropy,
        "sampler_logp": batch.old_logp, "sum_p2": batch.sum_p2, "sum_p2_logp": batch.sum_p2_logp,
        "advantage": batch.advantage, "weight": plan.weight, "scale": plan.scale, "clip_low": plan.clip_low,
        "clip_high": plan.clip_high, "clipped": clipped, "reason": plan.reason,
        "segment": segment_ids(ids, spelling, sequence=sequence),
    }  # fmt: skip
    columns = {name: value.numpy() for name, value in table.items() if value is not None}
    for name in ("response", "token", "segment"):
        columns[name] = columns[name].astype(np.int32)
    right = reward.bool().tolist()
    responses: dict[str, Any] = {
        "step": [0] * count, "response": list(range(count)), "update": [0] * count, "tokens": lengths,
        "group": group.numpy(), "sample": [n % 8 for n in range(count)], "reward": reward.numpy(),
        "verdict": ["correct" if r else "wrong" for r in right], "extracted": ["42"] * count,
        "finished": [True] * count, "prompt": [f"Problem {n // 8}: what is it? " * 8 for n in range(count)],
        "answer": ["42"] * count, "source": ["made"] * count,
    }  # fmt: skip
    info = StepInfo(0, count, tokens, count, [UpdateInfo(0, count, tokens, micro_batches=[count])], 0.8)
    return StepData(info, columns, responses)


def make_run(folder: Path, steps: int, tokens: int) -> None:
    """The folder of a run with so many steps and about so many tokens."""
    rng = np.random.default_rng(0)
    vocabulary = words(rng)
    mean = tokens // steps // 16
    spelling = vocabulary.text_bytes
    templates = [
        make_step(rng, [mean - 20 * (n % 3 - 1) for n in range(16)], spelling) for _ in range(min(TEMPLATES, steps))
    ]
    templates[0] = make_step(rng, [LONG, *[mean] * 15], spelling)
    manifest = Manifest(objective=OBJECTIVE, advantage="group_normalized", settings=RecordSettings(max_megabytes=1e6))
    recorder = RecordWriter(folder / "tokens", manifest, vocabulary, print)
    recorder.start(0)
    for step in range(1, steps + 1):
        data = templates[step % len(templates)]
        numbered = {**data.responses, "step": [step] * data.info.responses}
        whole = StepData(replace(data.info, step=step), data.tokens, numbered)
        recorder.write(step, lambda whole=whole: whole)  # type: ignore[misc]
    recorder.close()
    write_metrics(folder, steps, rng)


def write_metrics(folder: Path, steps: int, rng: np.random.Generator) -> None:
    """metrics.jsonl with two dozen metrics, and thirty alarms."""
    names = ["reward/mean", "reward/accuracy", "policy/entropy", "update/grad_norm", "update/clip_share"]
    names += ["tokens/silenced_share", "response/length_mean", "update/ratio_max", "s2t/entropy_threshold"]
    names += [f"time/part_{n}" for n in range(15)]
    walks = np.abs(np.cumsum(rng.standard_normal((steps, len(names))), 0) / 50 + 0.5)
    with (folder / "metrics.jsonl").open("w") as file:
        for step, row in enumerate(walks.tolist(), 1):
            file.write(json.dumps({"step": step, **dict(zip(names, row, strict=True))}) + "\n")
    with (folder / "alarms.jsonl").open("w") as file:
        for step in range(steps // 30, steps, max(steps // 30, 1)):
            file.write(json.dumps({"step": step, "alarm": "made", "message": "made for a benchmark"}) + "\n")


def first_paint(page: Path) -> dict[str, float] | None:
    """Milliseconds until something is painted, and until the microscope is there; None without a browser."""
    if not Path(CHROMIUM).exists():
        return None
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        tab = browser.new_page()
        tab.goto(page.resolve().as_uri())
        tab.wait_for_selector("#microscope")
        ready = tab.evaluate("performance.now()")
        painted = tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        browser.close()
    return {"first_paint_ms": round(painted), "microscope_ms": round(ready)}


def report(folder: Path, page: Path) -> tuple[float, float]:
    """Seconds of one report by the clock and of the CPU, in a process of its own."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-P", "-m", "trimtab", "report", str(folder), "--out", str(page)], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, cpu


def main() -> None:
    """Make the run, report on it, print and write what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=50_000_000)
    parser.add_argument("--run", type=Path, help="where the run is made, or kept from last time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.run or Path(temporary) / "run"
        if not folder.exists():
            make_run(folder, given.steps, given.tokens)
        page = Path(temporary) / "report.html"
        rounds = [report(folder, page) for _ in range(given.rounds)]
        result = {
            **about("trimtab report of a made run"),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "steps": given.steps,
            "tokens": given.tokens,
            "record_megabytes": round(sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 1e6),
            "rounds": given.rounds,
            "seconds": round(median(seconds for seconds, _ in rounds), 1),
            "seconds_least": round(min(seconds for seconds, _ in rounds), 1),
            "cpu_seconds": round(median(cpu for _, cpu in rounds), 1),
            "peak_megabytes": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1000),
            "page_megabytes": round(page.stat().st_size / 1e6, 2),
            **(first_paint(page) or {}),
        }
    print(json.dumps(result, indent=1))
    if given.out:
        save(result, given.out)


if __name__ == "__main__":
    main()
