"""The laboratory: what methods do to the entropy and to the accuracy of a tiny model that learns countdown on a CPU.

`laboratory.py expression --folder RUNS --jobs 2 --minutes 50` trains what is missing of a part, every objective with
every seed, stops after so many minutes, and writes `results/laboratory-expression.json`; the same command goes on with
it, also on another machine, since the result has the curves of all runs that have ended. Runs of one seed have the same
problems and the same warm start, so their differences are paired.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import spurious
from result_file import about
from trimtab.collapse import find_collapse
from trimtab.compare import CompareRun, ProcessPool, RunOutcome
from trimtab.compare.runs import plan_run
from trimtab.config import load
from trimtab.files import write_atomically
from trimtab.train.rollouts import sample_and_grade
from trimtab.train.trainer import build_trainer

RESULTS = Path(__file__).parent / "results"
POINTS = 100  # of a curve: means over consecutive steps
EVALUATION_STEP = -2  # no step of training or of its evaluations has this number, so no random numbers are shared
SAMPLES = 8  # of each held-out problem after the run
CURVES = (
    "policy/entropy", "groups/mixed_share", "reward/accuracy", "response/length_mean", "update/clip_share",
    "update/grad_norm", "tokens/silenced_share", "tokens/spurious_share", "tokens/top_gradient_share",
    "s2t/candidate_share", "tokens/boosted_share", "stare/gate_open", "stare/weight",
    "trim/drive", "trim/leverage", "trim/predicted_change", "trim/saturated", "trim/target", "trim/weight",
)  # fmt: skip
STUDY = ("record.enabled=false", "run.report=false", "run.checkpoint_every=1000", "run.keep_checkpoints=1")
STAPO = "stapo(tau_p=0.05)"  # the paper's 0.002 is meant for vocabularies of 150 thousand tokens; this one has 21
MAIN = (
    "grpo", "dapo", "gspo", "sspo", STAPO, "stare", "stare(adaptive=true)", "stare(boost=critical)",
    "dapo + entropy_bonus", "dapo + trim", f"{STAPO} + trim", "sspo + trim",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A part of the study: objectives x seeds, or with `variants` objectives x settings x seeds."""

    what: str
    recipe: str
    objectives: tuple[str, ...]
    settings: tuple[str, ...] = ()
    variants: tuple[str, ...] = ("",)
    seeds: int = 5
    save_model: Callable[[Path], Path] | None = None  # where the recipe names no model

    def runs(self, folder: Path) -> Iterator[CompareRun]:
        """Yield the runs: all objectives with one seed before the next seed, so that a part of them is paired too."""
        path = () if self.save_model is None else (f"model.path={self.save_model(folder)}",)
        for seed in range(self.seeds):
            for variant in self.variants:
                for objective in self.objectives:
                    settings = (*STUDY, *path, *self.settings, *variant.split())
                    yield plan_run(folder, self.recipe, objective, seed, settings, variant)


PARTS = {
    "laws": Part(
        "control laws of trim",
        "countdown",
        tuple(f"dapo + trim(law={law})" for law in ("balance", "raise", "critical", "least")),
        seeds=2,
    ),
    "expression": Part("countdown as an expression", "countdown", MAIN),
    "spurious": Part(
        "rare rewarded tokens of a word-level model",
        "benchmarks/spurious.toml",
        ("dapo", "grpo", "stapo", "stapo(tau_p=0.0002)", "dapo + s2t(mask=random)"),
        settings=("warm_start.steps=0", "task.size=2000"),
        variants=("update.lr=1e-4", "update.lr=3e-4", "update.lr=1e-3"),
        seeds=2,
        save_model=spurious.save_warm_model,
    ),
    "spurious-tokens": Part(  # the second pass over a batch sees what the first one did to its tokens
        "what an update does to rare rewarded tokens",
        "benchmarks/spurious.toml",
        ("dapo",),
        settings=("warm_start.steps=0", "task.size=2000", "record.enabled=true", "run.steps=30", "update.passes=2"),
        variants=("update.lr=3e-4",),
        seeds=1,
        save_model=spurious.save_warm_model,
    ),
}


def figures(run: CompareRun, outcome: RunOutcome) -> dict[str, Any]:
    """Return what the study keeps of a run that has ended: its curves, and an evaluation by sampling."""
    records = run.folder.records()
    steps = [record for record in records if "policy/entropy" in record]
    tests = [record for record in records if "eval/accuracy" in record]
    collapse = find_collapse(records)
    return {
        "objective": run.objective,
        "seed": run.seed,
        **({"variant": run.variant} if run.variant else {}),
        "state": outcome.state,
        "steps": len(steps),
        "seconds": round(sum(record["time/rollout"] + record["time/update"] for record in steps), 1),
        "collapse": None if collapse is None else collapse.step,
        **sampled_accuracy(run),
        "evaluations": [[int(record["step"]), round(record["eval/accuracy"], 4)] for record in tests],
        "curves": {name: curve for name in CURVES if (curve := thinned(steps, name))},
        "fit": prediction_fit(steps),
        **({"rare": rare_tokens(run.folder.path)} if run.config.record.enabled else {}),
    }


def rare_tokens(folder: Path) -> dict[str, Any]:
    """Return the figures of rare tokens by what counts as rare: the paper's bound, and one that leaves slips only."""
    return {f"p < {tau_p:g}": spurious.rare_tokens(folder, tau_p) for tau_p in (0.002, 0.0002)}


def thinned(records: Sequence[Mapping[str, float]], name: str) -> list[list[float]]:
    """Return the metric as at most `POINTS` means over consecutive steps: [last step, mean]."""
    values = [(int(record["step"]), record[name]) for record in records if name in record]
    size = max(1, -(-len(records) // POINTS))
    parts = [values[first : first + size] for first in range(0, len(values), size)]
    return [[part[-1][0], float(f"{fmean(value for _, value in part):.4g}")] for part in parts]


def prediction_fit(records: Sequence[Mapping[str, float]]) -> dict[str, float] | None:
    """Return gain and R^2 of the entropy's change from step to step against the one that trim predicted."""
    pairs = [
        (before["trim/predicted_change"], after["policy/entropy"] - before["policy/entropy"])
        for before, after in pairwise(records)
        if "trim/predicted_change" in before
    ]
    if len(pairs) < 2:
        return None
    x, y = torch.tensor(pairs, dtype=torch.float64).T
    x, y = x - x.mean(), y - y.mean()
    covariance = (x * y).sum()
    return {"gain": float(covariance / (x * x).sum()), "r2": float(covariance**2 / ((x * x).sum() * (y * y).sum()))}


def sampled_accuracy(run: CompareRun) -> dict[str, float]:
    """Sample the held-out problems with the trained model; return accuracy (greedy, sampled) and pass@k."""
    if not run.folder.model.is_dir():
        return {}
    config = load(run.recipe, [*run.settings, f"model.path={run.folder.model}", "warm_start.steps=0"])
    trainer = build_trainer(config)
    assert trainer.test_task is not None
    problems = [(n, trainer.test_task[n]) for n in range(config.run.eval_problems)]
    greedy = sample_and_grade(trainer, problems, EVALUATION_STEP, config.sampling_options(samples=1, temperature=0.0))
    options = config.sampling_options(samples=SAMPLES)
    groups = [
        [response.verdict.kind == "correct" for response in group]
        for group in sample_and_grade(trainer, problems, EVALUATION_STEP, options)
    ]
    return {
        "greedy": fmean(group[0].verdict.kind == "correct" for group in greedy),
        "sampled": fmean(right for group in groups for right in group),
        f"pass@{SAMPLES}": fmean(any(group) for group in groups),
    }


def save(part: Part, out: Path, runs: Mapping[str, dict[str, Any]]) -> None:
    """Write the result, one line per run."""
    head = json.dumps(about(part.what) | {"recipe": part.recipe, "settings": part.settings}, indent=1)
    lines = [f"  {json.dumps(name)}: {json.dumps(run)}" for name, run in sorted(runs.items())]
    text = head.removesuffix("\n}") + ',\n "runs": {\n' + ",\n".join(lines) + "\n }\n}\n"
    write_atomically(out, text)


def run_part(part: Part, folder: Path, out: Path, jobs: int, minutes: float) -> bool:
    """Train what is missing for so many minutes at most; return whether anything is still missing."""
    torch.set_num_threads(1)
    done: dict[str, dict[str, Any]] = json.loads(out.read_text())["runs"] if out.exists() else {}
    waiting = [run for run in part.runs(folder) if run.name not in done]

    def keep(outcome: RunOutcome) -> None:
        if outcome.counts:
            done[outcome.run.name] = figures(outcome.run, outcome)
            save(part, out, done)
            shutil.rmtree(outcome.run.folder.checkpoints, ignore_errors=True)

    pool = ProcessPool(waiting, jobs, lambda line: print(line, flush=True), on_end=keep)
    threading.Timer(60 * minutes, signal.raise_signal, [signal.SIGTERM]).start()
    pool.run()
    return any(run.name not in done for run in waiting)


def main() -> int:
    """Run one part as far as the time goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--folder", type=Path, required=True, help="where the runs are; one for each part")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=1e5)
    parser.add_argument("--seeds", type=int, help="fewer than the part has")
    args = parser.parse_args()
    part = PARTS[args.part]
    out = RESULTS / f"laboratory-{args.part}.json"
    return int(run_part(part, args.folder, out, args.jobs, args.minutes))


if __name__ == "__main__":
    sys.exit(main())
