"""The table of docs/more-signal.md: accuracy for equal numbers of sampled responses, and for equal CPU time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from statistics import fmean

from laboratory_pages import Run, at_end, not_run, points, result
from trimtab.experiments.intervals import seed_difference
from trimtab.text import NOTHING, markdown_table, percent

PART = "signal"
WORDS = {
    "": "as it is",
    "objective.count=signal": '`count = "signal"`',
    "curriculum.problems=pools": '`problems = "pools"`',
    "curriculum.gates=['mixed']": '`gates = ["mixed"]`, which is dynamic sampling',
    "curriculum.gates=['mixed','mean_reward'] curriculum.mean_above=0.2 curriculum.mean_below=0.8": (
        '`gates = ["mixed", "mean_reward"]`, mean reward between 0.2 and 0.8'
    ),
}


def without_steps(variant: str) -> str:
    """Return a variant without its number of steps: the gates sample more in a step, and run for fewer."""
    return " ".join(word for word in variant.split() if not word.startswith("run.steps="))


def accuracy_at(run: Run, spent: Sequence[float], budget: float) -> float | None:
    """Interpolate held-out accuracy at a budget, of which so much was `spent` at each evaluation; None beyond it."""
    values = [value for _, value in run["evaluations"]]
    if not spent or budget > spent[-1]:
        return None
    right = max(1, bisect_left(spent, budget))
    left = right - 1
    share = (budget - spent[left]) / (spent[right] - spent[left])
    return float(values[left] + share * (values[right] - values[left]))


def cpu_spent(run: Run) -> list[float]:
    """Return the CPU seconds up to each evaluation, in proportion to the responses; empty if they are not known."""
    total, responses = run.get("cpu_seconds"), run["responses"]
    return [total * count / responses[-1] for count in responses] if total else []


def rows_of(runs: Sequence[Run]) -> dict[str, dict[int, Run]]:
    """Return the runs by what is done, and by seed, the plain run first."""
    found: dict[str, dict[int, Run]] = {}
    for run in sorted(runs, key=lambda run: [*WORDS].index(without_steps(run["variant"]))):
        found.setdefault(without_steps(run["variant"]), {})[run["seed"]] = run
    return found


def table() -> str:
    """The table, of the runs that there are."""
    found = result(PART)
    if found is None:
        return not_run(PART)
    rows = rows_of([*found["runs"].values()])
    every = [run for seeds in rows.values() for run in seeds.values()]
    responses = min(run["responses"][-1] for run in every)
    seconds = min((cpu_spent(run)[-1] for run in every if cpu_spent(run)), default=0.0)
    body = [_row(name, seeds, rows.get("", {}), responses, seconds) for name, seeds in rows.items()]
    heads = [
        "`dapo` on countdown", "seeds", "mixed groups", f"after {responses:,} responses", "difference",
        f"after {seconds:.0f} CPU s", "difference", "CPU s per 1,000 responses",
    ]  # fmt: skip
    return "\n\n".join([
        markdown_table(heads, body),
        "Held-out accuracy with greedy decoding, means over seeds. Responses of refused groups count. Differences to "
        "the first row are in percentage points, with their paired 95 % interval: runs of one seed have the same warm "
        "start. *Mixed groups*: share of the groups trained on whose rewards differ, at the end. "
        f"Recipe `{found['recipe']}`, torch {found['versions']['torch']}, {found['date']}.",
    ])  # fmt: skip


def _row(name: str, seeds: Mapping[int, Run], base: Mapping[int, Run], responses: float, seconds: float) -> list[str]:
    cells = [
        WORDS[name],
        str(len(seeds)),
        percent(fmean(at_end(run, "groups/mixed_share") or 0.0 for run in seeds.values())),
    ]
    for budget, by_cpu in ((responses, False), (seconds, True)):
        ours, theirs = (
            {
                seed: accuracy_at(run, cpu_spent(run) if by_cpu else run["responses"], budget)
                for seed, run in each.items()
            }
            for each in (seeds, base)
        )
        known = [value for value in ours.values() if value is not None]
        cells += [
            percent(fmean(known)) if known else NOTHING,
            points(seed_difference(ours, theirs)) if name else NOTHING,
        ]
    costs = [1000 * run["cpu_seconds"] / run["responses"][-1] for run in seeds.values() if run.get("cpu_seconds")]
    return [*cells, f"{fmean(costs):.2f}" if costs else NOTHING]
