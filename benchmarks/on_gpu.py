"""Measure the figures of docs/gpu.md again, within a number of minutes: what was never measured first, then the oldest.

A part is one script of this folder with its arguments and its limit in seconds, in a process of its own. If it fails or
reaches its limit, its earlier result stays, what it had measured is in `NAME.partial.json`, and the next part runs.
A part that does not fit into the time left is passed over, and so is one whose packages are missing. Called again, the
command goes on with what is left. `--list` shows the parts and the dates of their results.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
STEP_1_7B = (
    "step.py --shape 1.7B --only fixed --phases --peer trl-vllm --rows 8 --steps 3 --warmup 1 --peer-steps 2 "
    "--peer-warmup 1 --set rollout.prompts=16 --set rollout.samples=8 --set rollout.max_new_tokens=1024 "
    "--set rollout.batch_size=128 --set update.token_budget=16384 --set warm_start.steps=0"
)


@dataclass(frozen=True)
class Part:
    """One measurement: a script with its arguments, its result, its limit in seconds, the packages it needs."""

    command: str
    result: str
    limit: float
    needs: tuple[str, ...] = ()
    adds: bool = False  # to the figures of earlier calls, in the same file

    def measured(self, results: Path) -> str:
        """Return the date of the result; empty if there is none."""
        path = results / self.result
        return str(json.loads(path.read_text())["date"])[:10] if path.exists() else ""

    def missing(self) -> list[str]:
        """Return the packages that this Python does not have."""
        return [name for name in self.needs if find_spec(name) is None]


PARTS: Mapping[str, Part] = {
    "verl": Part("verl_gpu.py --eager --limit 285", "verl-h200.json", 580, ("verl", "ray", "vllm")),
    "trl-learning-vllm": Part(
        "trl_learning.py --sampler vllm --steps 25", "trl-learning-vllm-h200.json", 330, ("trl", "vllm")
    ),
    "trl-learning-transformers": Part(
        "trl_learning.py --sampler transformers --steps 20", "trl-learning-transformers-h200.json", 330, ("trl",)
    ),
    "vllm-8b": Part(
        "vllm_sampling.py --shapes 8B --settings 'in process' --ways 'with log-probs' --start-limit 150",
        "vllm-sampling-h200.json", 420, ("vllm",), adds=True,
    ),
    "vllm-engine": Part("vllm_engine.py", "vllm-engine-h200.json", 420, ("vllm",), adds=True),
    "mfu": Part("mfu.py", "mfu-h200.json", 240),
    "head": Part("head.py", "head-h200.json", 180),
    "decoding": Part("decoding.py", "decoding-h200.json", 240),
    "sampler": Part("sampler.py", "sampler-h200.json", 420),
    "step": Part("step.py", "step-h200.json", 300, ("trl",)),
    "step-vllm-135m": Part(
        "step.py --only fixed --phases --peer trl-vllm --rows 128 --vllm-memory 0.15 --steps 7 --peer-steps 3",
        "step-vllm-135m-h200.json", 300, ("trl", "vllm"),
    ),
    "step-vllm-1.7b": Part(STEP_1_7B, "step-vllm-1.7b-h200.json", 420, ("trl", "vllm")),
    "long-step": Part("long_step.py", "long-step-h200.json", 240),
    "memory": Part("memory.py", "memory-h200.json", 360),
    "overhead": Part("overhead.py", "overhead-h200.json", 240),
    "objectives": Part("objectives.py --device cuda", "objectives-h200.json", 120),
    "several-gpus": Part(
        "several_gpus.py overhead memory --set rollout.kv_cache_memory=0.1 --rounds 16", "several-gpus-h200.json", 300,
        adds=True,
    ),
}  # fmt: skip


def due(parts: Mapping[str, Part], results: Path, since: str) -> list[str]:
    """Return the parts without a result of this day or a later one: never measured first, then by date."""
    dates = {name: part.measured(results) for name, part in parts.items()}
    return sorted((name for name, day in dates.items() if day < since), key=lambda name: dates[name])


def run(part: Part, results: Path) -> str:
    """Run a part in a process of its own, and return how it ended in words; empty if it has a new result."""
    new, whole = results / f"{Path(part.result).stem}.partial.json", results / part.result
    new.unlink(missing_ok=True)
    if part.adds and whole.exists():
        new.write_text(whole.read_text())
    command = [sys.executable, *shlex.split(f"{HERE}/{part.command}"), "--out", str(new)]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(part.limit)
    except subprocess.TimeoutExpired:
        return f"cut after {part.limit:g} s"
    finally:
        # Also where the script has ended by itself: what it left running would hold the GPU's memory.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code or not new.exists():
        return f"exit code {code}"
    new.replace(whole)
    return ""


def main(arguments: Sequence[str] | None = None, parts: Mapping[str, Part] = PARTS) -> int:
    """Measure what is due, and say of every part how it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"some of: {', '.join(parts)}; else all", metavar="PART")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--since", default=date.today().isoformat(), help="the day from which on a result is new")
    parser.add_argument("--list", action="store_true", help="show the parts, and run none")
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.parts if name not in parts]:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(parts)}")
    chosen = {name: parts[name] for name in args.parts or parts}
    if args.list:
        for name, part in chosen.items():
            print(f"{part.measured(args.results) or 'not measured':12}  {part.limit:4g} s  {name}: {part.command}")
        return 0
    end, failed = time.monotonic() + 60 * args.minutes, 0
    for name in due(chosen, args.results, args.since):
        part, start = chosen[name], time.monotonic()
        if missing := part.missing():
            said = f"passed over: {', '.join(missing)} not installed"
        elif start + part.limit > end:
            said = f"passed over: up to {part.limit:g} s do not fit into the {end - start:.0f} s left"
        else:
            print(f"{name}: {part.command}", flush=True)
            problem = run(part, args.results)
            failed += bool(problem)
            said = f"{problem or 'measured'}, {time.monotonic() - start:.0f} s"
        print(f"{name}: {said}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
