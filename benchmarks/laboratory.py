"""The laboratory: what methods do to the entropy and to the accuracy of a tiny model that learns countdown on a CPU.

`laboratory.py expression --folder RUNS --jobs 2 --minutes 50` trains what is missing of a part, every objective with
every seed, stops after so many minutes, and writes `results/laboratory-expression.json`; the same command goes on with
it, also on another machine, since the result has the curves of all runs that have ended. Runs of one seed have the same
problems and the same warm start, so their differences are paired.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import spurious
from result_file import about
from trimtab.experiments.grid import GridRun, ProcessPool, RunOutcome, plan_run
from trimtab.files import write_atomically
from trimtab.objectives.entropy_control import prediction_fit, prediction_pairs
from trimtab.record import find_collapse
from trimtab.trainer.config import load
from trimtab.trainer.model import score
from trimtab.trainer.train.rollouts import sample_and_grade
from trimtab.trainer.train.scoring import transcripts_of
from trimtab.trainer.train.trainer import build_trainer

RESULTS = Path(__file__).parent / "results"
POINTS = 100  # of a curve: means over consecutive steps
EVALUATION_STEP = -2  # no step of training or of its evaluations has this number, so no random numbers are shared
FIRST = 5  # objectives of a part that are trained with all its seeds, before the others with the last five
SAMPLES = 8  # of each held-out problem after the run
CURVES = (
    "policy/entropy", "groups/mixed_share", "reward/accuracy", "response/length_mean", "update/clip_share",
    "update/grad_norm", "tokens/silenced_share", "tokens/spurious_share", "tokens/top_gradient_share",
    "s2t/candidate_share", "tokens/boosted_share", "stare/gate_open", "stare/weight",
    "lag/mean", "lag/max", "lag/spans_mean", "sampler/effective_sample_share",
    "sampler/mismatch_mean", "sampler/kept_mean", "update/approx_kl", "entropy_bonus/coef",
    "trim/drive", "trim/leverage", "trim/predicted_change", "trim/saturated", "trim/target", "trim/weight",
)  # fmt: skip
STUDY = (
    "record.enabled=false", "run.report=false", "run.checkpoint_every=1000", "run.keep_checkpoints=1",
    "run.eval_every=100", "update.old_stats=sampled", "update.shared_prompts=true", "update.measure_every=20",
)  # fmt: skip
WIDE_SSPO = "sspo(clip_low=0.2, clip_high=0.28)"  # a token's clip range on subsentences: the first reading
STAPO = "stapo(tau_p=0.05)"  # the paper's 0.002 is meant for vocabularies of 150 thousand tokens; this one has 21
MAIN = (
    "dapo", "dapo + trim", "stare", "grpo", "stare(boost=critical)",
    "dapo + entropy_bonus(target=0.3)", "stare(adaptive=true)", f"{STAPO} + trim", "sspo + trim", "gspo", "sspo", STAPO,
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A part of the study: objectives x seeds, or with `variants` objectives x settings x seeds."""

    what: str
    recipe: str
    objectives: tuple[str, ...]
    settings: tuple[str, ...] = ()
    variants: tuple[str, ...] = ("",)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    save_model: Callable[[Path], Path] | None = None  # where the recipe names no model
    device: str = "cpu"

    def runs(self, folder: Path) -> Iterator[GridRun]:
        """Yield the runs, the main objectives first and seed by seed, so that a part of them is paired too."""
        path = () if self.save_model is None else (f"model.path={self.save_model(folder)}",)
        first, others = self.objectives[:FIRST], self.objectives[FIRST:]
        for objectives, seeds in ((first, self.seeds), (others, self.seeds[-5:])):
            for seed in seeds:
                for variant in self.variants:
                    for objective in objectives:
                        settings = (*STUDY, f"run.device={self.device}", *path, *self.settings, *variant.split())
                        yield plan_run(folder, self.recipe, objective, seed, settings, variant)


PARTS = {
    # The law of `trim` was chosen on seeds 0 and 1. Seeds 8 to 12 were run once, when all was settled.
    "expression": Part("countdown as an expression", "countdown", MAIN, seeds=tuple(range(13))),
    "steps": Part("countdown in steps", "countdown-steps", MAIN),
    "long": Part(
        "ten thousand steps",
        "countdown",
        ("dapo", "dapo + trim", "stare", "stare(boost=critical)"),
        ("run.steps=10000",),
        seeds=(0, 1, 2),
    ),
    "ablations": Part(
        "targets, gains, sides and sources of trim, and other weights of STARE",
        "countdown",
        (
            "dapo + trim(floor=0.1)", "dapo + trim(floor=0.2)", "dapo + trim(floor=0.5)",
            "dapo + trim(integral_gain=0.0)", "dapo + trim(phi=estimated)",
            "dapo + trim(gain=0.1)", "dapo + trim(gain=2.0)", "dapo + trim(ceiling=0.4)",
            "dapo + trim(floor=0.5, fall=0.2, fall_steps=1500)", "stare(boost=2.0)", "stare(boost=4.0)",
            "dapo(clip_high=0.5)", "dapo + entropy_bonus(coef=0.01)",
        ),
        seeds=(0, 1, 2),
    ),
    "smollm2": Part(  # on a GPU; problems of two to four numbers, so that there is more to learn after the first kind
        "SmolLM2-135M from nothing, with dynamic sampling",
        "smollm2-zero",
        ("dapo", "dapo + trim", "stare(boost=critical)"),
        (
            "update.old_stats=scored", "update.shared_prompts=false", "rollout.dynamic_sampling=true",
            "task.min_terms=2", "task.terms=4", "rollout.prompts=32", "update.token_budget=8192", "run.steps=80",
            "run.eval_every=10", "update.measure_every=10",
        ),
        seeds=(0, 1, 2),
        device="cuda",
    ),
    "baselines": Part(
        "DAPO with a lower learning rate, and with dynamic sampling",
        "countdown",
        ("dapo", "dapo + trim"),
        variants=("update.lr=2e-4", "rollout.dynamic_sampling=true"),
        seeds=(0, 1, 2),
    ),
    "off-policy": Part(
        "several updates per rollout, and several passes over it",
        "countdown-steps",
        ("grpo", "gspo", "sspo", WIDE_SSPO, "dapo", "dapo + trim"),
        variants=("update.per_step=8", "update.per_step=8 update.passes=2"),
        seeds=(0, 1, 2),
    ),
    "signal": Part(  # the gates sample several times as much, so they run for fewer steps
        "what is done about groups without signal",
        "countdown",
        ("dapo",),
        settings=("run.eval_every=50",),
        variants=(
            "run.steps=800",
            "run.steps=800 objective.count=signal",
            "run.steps=800 curriculum.problems=pools",
            "run.steps=400 curriculum.gates=['mixed']",
            "run.steps=400 curriculum.gates=['mixed','mean_reward'] curriculum.mean_above=0.2 "
            "curriculum.mean_below=0.8",
        ),
        seeds=(0, 1, 2),
    ),
    "lag": Part(  # the correction is the identity without a lag
        "partial rollouts, on responses of very different lengths",
        "benchmarks/ragged.toml",
        ("dapo + tis",),
        settings=("update.old_stats=scored", "rollout.prompts=16", "run.steps=80", "run.eval_every=20"),
        variants=tuple(f"rollout.max_lag={lag}" for lag in (0, 1, 2, 4)),
        seeds=(0, 1, 2),
    ),
    "truncation": Part(  # scored, since the sampler's own figures would show no mismatch
        "top-p 0.9, scored over the whole vocabulary and over the tokens that it keeps",
        "countdown",
        ("dapo",),
        ("update.old_stats=scored", "run.steps=600", "rollout.top_p=0.9"),
        variants=tuple(f"rollout.exact_truncation={exact}" for exact in ("false", "true")),
        seeds=(0, 1, 2),
    ),
    "entropy-gradient": Part(
        "an entropy bonus by the sampled token, and by the gradient of the entropy",
        "countdown",
        ("dapo + entropy_bonus(target=0.3)", "dapo + entropy_bonus(target=0.3, gradient=exact)"),
        ("run.steps=600",),
        seeds=(0, 1, 2),
    ),
    "length": Part(  # a problem of more changes is solved in more tokens of the same kind
        "the critical weight by the length of the responses",
        "benchmarks/spurious.toml",
        ("stare(boost=critical, gate=none)",),
        settings=("run.steps=50",),
        variants=tuple(
            f"task.changes={changes} rollout.max_new_tokens={6 + 6 * changes} rollout.max_prompt_tokens=24"
            for changes in (1, 2, 3, 5, 8)
        ),
        seeds=(0, 1),
        save_model=lambda folder: spurious.save_model(folder / "fresh"),
    ),
    "spurious": Part(
        "rare rewarded tokens of a word-level model",
        "benchmarks/spurious.toml",
        ("dapo", "grpo", "stapo", "stapo(tau_p=0.0002)", "dapo + s2t(mask=random)"),
        settings=("warm_start.steps=0", "task.size=2000"),
        variants=("update.lr=1e-4", "update.lr=3e-4", "update.lr=1e-3"),
        seeds=(0, 1),
        save_model=spurious.save_warm_model,
    ),
    "spurious-long": Part(
        "rare rewarded tokens at rates that keep the policy, for longer",
        "benchmarks/spurious.toml",
        ("dapo", "stapo", "dapo + s2t(mask=random)", "stapo(tau_p=0.0002)"),
        settings=("warm_start.steps=0", "task.size=2000", "run.steps=300", "run.eval_every=50"),
        variants=("update.lr=3e-5", "update.lr=1e-4"),
        seeds=(0, 1, 2, 3, 4),
        save_model=spurious.save_warm_model,
    ),
    "spurious-tokens": Part(  # the second pass over a batch sees what the first one did to its tokens
        "what an update does to rare rewarded tokens",
        "benchmarks/spurious.toml",
        ("dapo",),
        settings=("warm_start.steps=0", "task.size=2000", "record.enabled=true", "run.steps=30", "update.passes=2"),
        variants=("update.lr=3e-4",),
        seeds=(0,),
        save_model=spurious.save_warm_model,
    ),
}  # fmt: skip


def figures(run: GridRun, outcome: RunOutcome) -> dict[str, Any]:
    """Return what the study keeps of a run that has ended: its curves, and an evaluation by sampling."""
    records = run.folder.records()
    steps = [record for record in records if "policy/entropy" in record]
    tests = [record for record in records if "eval/accuracy" in record]
    collapse, fit = find_collapse(records), prediction_fit(pair for _, pair in prediction_pairs(steps))
    return {
        "objective": run.objective,
        "seed": run.seed,
        **({"variant": run.variant} if run.variant else {}),
        "state": outcome.state,
        "steps": len(steps),
        "torch": torch.__version__,
        "seconds": round(sum(record["time/rollout"] + record["time/update"] for record in steps), 1),
        "collapse": None if collapse is None else collapse.step,
        **sampled_accuracy(run),
        "evaluations": [[int(record["step"]), round(record["eval/accuracy"], 4)] for record in tests],
        "responses": responses_before(run, steps, [int(record["step"]) for record in tests]),
        "curves": {name: curve for name in CURVES if (curve := thinned(steps, name))},
        "fit": None if fit is None else asdict(fit),
        **({"rare": rare_tokens(run.folder.path)} if run.config.record.enabled else {}),
    }


def responses_before(run: GridRun, records: Sequence[Mapping[str, float]], ends: Sequence[int]) -> list[int]:
    """Return how many responses were sampled up to the end of each of these steps, also of groups not trained on."""
    rollout = run.config.rollout
    groups = {int(record["step"]): int(record.get("curriculum/sampled", rollout.prompts)) for record in records}
    return [rollout.samples * sum(count for step, count in groups.items() if step <= end) for end in ends]


def rare_tokens(folder: Path) -> dict[str, Any]:
    """Return the figures of rare tokens by what counts as rare: the paper's bound, and one that leaves slips only."""
    return {f"p < {tau_p:g}": spurious.rare_tokens(folder, tau_p) for tau_p in (0.002, 0.0002)}


def thinned(records: Sequence[Mapping[str, float]], name: str) -> list[list[float]]:
    """Return the metric as at most `POINTS` means over consecutive steps: [last step, mean]."""
    values = [(int(record["step"]), record[name]) for record in records if name in record]
    size = max(1, -(-len(records) // POINTS))
    parts = [values[first : first + size] for first in range(0, len(values), size)]
    return [[part[-1][0], float(f"{fmean(value for _, value in part):.4g}")] for part in parts]


def sampled_accuracy(run: GridRun) -> dict[str, float]:
    """Sample the held-out problems with the trained model; return accuracy (greedy, sampled), pass@k and entropy.

    The entropy is that of the whole vocabulary, whatever the run was trained on.
    """
    if not run.folder.model.is_dir():
        return {}
    config = load(run.recipe, [*run.settings, f"model.path={run.folder.model}", "warm_start.steps=0"])
    trainer = build_trainer(config)
    assert trainer.test_task is not None
    problems = [(n, trainer.test_task[n]) for n in range(config.run.eval_problems)]
    greedy = sample_and_grade(trainer, problems, EVALUATION_STEP, config.sampling_options(samples=1, temperature=0.0))
    options = config.sampling_options(samples=SAMPLES)
    sampled = sample_and_grade(trainer, problems, EVALUATION_STEP, options)
    groups = [[response.verdict.kind == "correct" for response in group] for group in sampled]
    transcripts = transcripts_of([response for group in sampled for response in group])
    budget, chunk = config.update.token_budget, config.update.head_chunk
    return {
        "entropy": float(score(trainer.policy, transcripts, config.rollout.temperature, budget, chunk).entropy.mean()),
        "greedy": fmean(group[0].verdict.kind == "correct" for group in greedy),
        "sampled": fmean(right for group in groups for right in group),
        f"pass@{SAMPLES}": fmean(any(group) for group in groups),
    }


def save(part: Part, out: Path, runs: Mapping[str, dict[str, Any]]) -> None:
    """Write the result, one line per run."""
    command = f"python benchmarks/laboratory.py {out.stem.removeprefix('laboratory-')} --folder RUNS"
    made = {"command": command, "recipe": part.recipe, "settings": part.settings}
    head = json.dumps(about(part.what, torch.device(part.device)) | made, indent=1)
    lines = [f"  {json.dumps(name)}: {json.dumps(run)}" for name, run in sorted(runs.items())]
    text = head.removesuffix("\n}") + ',\n "runs": {\n' + ",\n".join(lines) + "\n }\n}\n"
    write_atomically(out, text)


class CpuMeter:
    """The CPU seconds of runs, one after the other, in a file, so that those of a resumed run add up."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
        self.before = _cpu_of_ended_processes()

    def charge(self, name: str) -> float:
        """Add what processes that ended since the last call have used to this run; return its sum."""
        now = _cpu_of_ended_processes()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.before
        self.before = now
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, json.dumps(self.seconds))
        return self.seconds[name]


def _cpu_of_ended_processes() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_part(part: Part, folder: Path, out: Path, jobs: int, minutes: float) -> bool:
    """Train what is missing for so many minutes at most; return whether anything is still missing."""
    torch.set_num_threads(1)
    done: dict[str, dict[str, Any]] = json.loads(out.read_text())["runs"] if out.exists() else {}
    waiting = [run for run in part.runs(folder) if run.name not in done]

    meter = CpuMeter(folder / "cpu.json")

    def keep(outcome: RunOutcome) -> None:
        used = meter.charge(outcome.run.name)
        if outcome.counts:
            done[outcome.run.name] = figures(outcome.run, outcome)
            if jobs == 1:  # of more at a time it would not be known which of them used it
                done[outcome.run.name]["cpu_seconds"] = round(used, 1)
            save(part, out, done)
            shutil.rmtree(outcome.run.folder.checkpoints, ignore_errors=True)

    pool = ProcessPool(waiting, jobs, lambda line: print(line, flush=True), on_end=keep)
    timer = threading.Timer(60 * minutes, signal.raise_signal, [signal.SIGTERM])
    timer.start()
    for outcome in pool.run():
        if outcome.why == "interrupted":
            meter.charge(outcome.run.name)
    timer.cancel()  # else the process waits for it
    return any(run.name not in done for run in waiting)


def main() -> int:
    """Run one part as far as the time goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--folder", type=Path, required=True, help="where the runs are; one for each part")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=1e5)
    parser.add_argument("--seeds", type=int, nargs="+", metavar="SEED", help="others than the part has")
    args = parser.parse_args()
    part = PARTS[args.part] if args.seeds is None else replace(PARTS[args.part], seeds=tuple(args.seeds))
    out = RESULTS / f"laboratory-{args.part}.json"
    return int(run_part(part, args.folder, out, args.jobs, args.minutes))


if __name__ == "__main__":
    sys.exit(main())
