"""Tables and sentences of the laboratory, the study's second part, from `benchmarks/laboratory.py`'s results.

Every result may be incomplete or missing: a table shows the runs that are there, and a part without any says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import fmean, median, mode
from typing import Any, NamedTuple

from trimtab.experiments.intervals import SeedDifference, seed_difference
from trimtab.objectives import ATTACHMENTS
from trimtab.text import NOTHING, markdown_table, number, percent

RESULTS = Path(__file__).parent.parent / "benchmarks/results"
TARGET = float(ATTACHMENTS["trim"].options["floor"].default)  # where no run of a part has another
STARE_TARGET = float(ATTACHMENTS["stare"].options["target"].default)
TARGET_OPTION = re.compile(r"\b(?:target|floor)=([\d.e-]+)(?:, )?")
BAND = 0.2  # how far from its target, relative to it, the entropy is still in the band
EMPTY = 0.05  # nats: a policy below it says the same thing to a prompt nearly every time
LAST = 0.1  # of a run: the share of its points whose mean is the value at the end
FIRST = "expression"  # the part that the pictures and most sentences are about
PARTS = (FIRST, "steps", "long", "ablations", "off-policy", "spurious")  # with a section of their own in docs/study.md
ELSEWHERE = ("length", "signal", "spurious-tokens", "truncation")  # parts that are not tables of objectives
# What the others are compared with: the same setting under this objective. The ablations vary trim itself.
REFERENCE, REFERENCES = "dapo", {"ablations": "dapo + trim"}
# The objectives of the picture and of the sentence below it, with their names there.
SHOWN = {
    "dapo": "DAPO",
    "stare": "STARE as published",
    "stare(boost=critical)": "STARE with the critical weight",
    "dapo + trim": "DAPO + trim",
}
CONTRASTS = (  # of the findings
    ("dapo + trim", "dapo"),
    ("dapo + trim", "grpo"),
    ("stare", "dapo"),
    ("stare(boost=critical)", "stare"),
    ("dapo + trim", "stare"),
    ("dapo + trim", "stare(boost=critical)"),
    ("dapo + trim", "dapo + entropy_bonus"),
)

Run = Mapping[str, Any]


class Row(NamedTuple):
    """The runs of an objective under a variant, the settings that set it apart; a row of a table."""

    objective: str
    variant: str = ""

    @property
    def label(self) -> str:
        """The words in the table."""
        return f"`{self.objective}`" + (f", `{self.variant}`" if self.variant else "")


Runs = dict[Row, dict[int, Run]]  # by seed


def result(part: str) -> Mapping[str, Any] | None:
    """Return a part's file, or None if there is none or no run in it."""
    path = RESULTS / f"laboratory-{part}.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    return found if found.get("runs") else None


def runs(part: str) -> Runs:
    """Return a part's runs by row and seed, with the reference's of the first part if it has none of its own."""
    found, first, name = result(part), result(FIRST), _reference(part)
    rows = _rows(found)
    there = named(rows, name) or (part not in REFERENCES and any(row.objective == name for row in rows))
    # With the same recipe and settings the seeds have the same problems and the same warm start.
    same = found and first and all(found.get(key) == first.get(key) for key in ("recipe", "settings"))
    borrowed = named(_rows(first), name) if same and not there else None
    return rows | {borrowed: _rows(first)[borrowed]} if borrowed else rows


def _rows(found: Mapping[str, Any] | None) -> Runs:
    all_runs = list((found or {"runs": {}})["runs"].values())
    target, rows = common_target(all_runs), Runs()
    for run in all_runs:
        said = TARGET_OPTION.search(f"{run['objective']} {run.get('variant', '')}")
        own = float(said[1]) if said else STARE_TARGET if "stare" in run["objective"] else target
        rows.setdefault(Row(run["objective"], run.get("variant", "")), {})[run["seed"]] = run | {"target": own}
    return rows


def common_target(found: Iterable[Run]) -> float:
    """Return the target that most runs with trim end with; objectives without a target are held to the same band."""
    ends = [float(f"{curve[-1][1]:.3g}") for run in found if (curve := run["curves"].get("trim/target"))]
    return mode(ends) if ends else TARGET


def named(found: Runs, name: str, variant: str = "") -> Row | None:
    """Return the row of an objective, whatever its target: `dapo + trim` is also `dapo + trim(floor=0.2)`, if alone."""
    if Row(name, variant) in found:
        return Row(name, variant)
    same = [row for row in found if row.variant == variant and _without_target(row.objective) == name]
    return same[0] if len(same) == 1 else None


def _without_target(objective: str) -> str:
    return TARGET_OPTION.sub("", objective).replace(", )", ")").replace("()", "")


def _reference(part: str) -> str:
    return REFERENCES.get(part, REFERENCE)


# Figures of a run. None: the run has no such figure.


def at_end(run: Run, curve: str) -> float | None:
    """Return the mean over the last tenth of a curve's points."""
    values = [value for _, value in run["curves"].get(curve, [])]
    return fmean(values[-max(1, round(LAST * len(values))) :]) if values else None


def over_run(run: Run, curve: str) -> float | None:
    """Return the mean over a curve's points."""
    values = [value for _, value in run["curves"].get(curve, [])]
    return fmean(values) if values else None


def in_band(run: Run) -> float | None:
    """Return the share of points in the band since the entropy first fell to it; None if it never did."""
    own, given = dict(run["curves"].get("trim/target", [])), run.get("target", TARGET)
    near = [value / own.get(step, given) for step, value in run["curves"].get("policy/entropy", [])]
    first = next((place for place, each in enumerate(near) if each <= 1 + BAND), None)
    return None if first is None else fmean(abs(each - 1) <= BAND for each in near[first:])


def lost_at(run: Run) -> int | None:
    """Return the step of the collapse, or from which on the entropy is all but gone, whichever comes first."""
    empty = [step for step, value in run["curves"].get("policy/entropy", []) if value < EMPTY]
    steps = [*empty[:1], *([run["collapse"]] if run.get("collapse") is not None else [])]
    return min(steps, default=None)


FIGURES: dict[str, Callable[[Run], float | None]] = {
    "greedy": lambda run: run.get("greedy"),
    "sampled": lambda run: run.get("sampled"),
    "pass@8": lambda run: run.get("pass@8"),
    "entropy": lambda run: at_end(run, "policy/entropy"),
    "in_band": in_band,
    "mixed": lambda run: at_end(run, "groups/mixed_share"),
    "mismatch": lambda run: at_end(run, "sampler/mismatch_mean"),
    "length": lambda run: over_run(run, "response/length_mean"),
    "seconds": lambda run: run.get("seconds"),
    "weight": lambda run: at_end(run, "trim/weight"),
    "drive": lambda run: at_end(run, "trim/drive"),
    "leverage": lambda run: at_end(run, "trim/leverage"),
    "saturated": lambda run: over_run(run, "trim/saturated"),
    "gain": lambda run: (run.get("fit") or {}).get("gain"),
    "r2": lambda run: (run.get("fit") or {}).get("r2"),
}
SHARES = {"greedy", "sampled", "pass@8", "in_band", "mixed", "leverage", "saturated"}
DIGITS = {"seconds": 0, "length": 1, "weight": 2, "drive": 2, "r2": 2}  # of the others: 3


def mean(seeds: Mapping[int, Run], figure: str) -> float | None:
    """Return a figure's mean over the seeds that have it."""
    values = [value for run in seeds.values() if (value := FIGURES[figure](run)) is not None]
    return fmean(values) if values else None


def shown(seeds: Mapping[int, Run], figure: str) -> str:
    """Return the mean over seeds as text."""
    value = mean(seeds, figure)
    if figure == "gain":  # of any size: it holds the learning rate and what the weights share
        return NOTHING if value is None else f"{value:.3g}"
    return percent(value) if figure in SHARES else number(value, DIGITS.get(figure, 3))


def paired(ours: Mapping[int, Run], theirs: Mapping[int, Run], figure: str = "greedy") -> SeedDifference | None:
    """Compare a figure of two rows seed by seed."""
    of_ours, of_theirs = ({seed: FIGURES[figure](run) for seed, run in each.items()} for each in (ours, theirs))
    return seed_difference(of_ours, of_theirs)


def points(difference: SeedDifference | None) -> str:
    """Return a difference of two shares in percentage points, with its interval."""
    if difference is None:
        return NOTHING
    interval = f" [{100 * difference.low:+.1f}, {100 * difference.high:+.1f}]" if difference.pairs > 1 else ""
    return f"{100 * difference.mean:+.1f}{interval}"


def against(row: Row, found: Runs, part: str) -> Row | None:
    """Return the row that a row is compared with: the reference's of its own variant, or else without one."""
    rows = [named(found, _reference(part), variant) for variant in (row.variant, "")]
    others = [each for each in rows if each and each != row]
    return others[0] if others and (part in REFERENCES or row.objective != _reference(part)) else None


def ordered(found: Runs, part: str) -> list[Row]:
    """Return the rows by variant, the reference first, then by accuracy."""

    def place(row: Row) -> tuple[list[Any], bool, float]:
        words = re.split(r"(\d+(?:\.\d+)?(?:e-?\d+)?)", row.variant)  # every other one is a number: 8 before 16
        natural = [float(word) if n % 2 else word for n, word in enumerate(words)]
        return natural, row != named(found, _reference(part), row.variant), -(mean(found[row], "greedy") or 0.0)

    return sorted(found, key=place)


# Tables


def accuracy_table(part: str) -> str:
    """The held-out accuracy of every row, and its difference to the reference."""
    found, body = runs(part), []
    for row in ordered(found, part):
        other = against(row, found, part)
        difference = paired(found[row], found[other]) if other else None
        wide = paired(found[row], found[other], "pass@8") if other else None
        signs = NOTHING if difference is None else f"{difference.agree} of {difference.pairs}"
        if difference and difference.unpaired:
            signs += f" ({difference.unpaired} left out)"
        means = [shown(found[row], figure) for figure in ("greedy", "sampled", "pass@8")]
        body.append([row.label, str(len(found[row])), *means, points(difference), signs, points(wide)])
    heads = [
        "objective",
        "seeds",
        "greedy",
        "sampled",
        "pass@8",
        "greedy, difference",
        "same sign",
        "pass@8, difference",
    ]
    return markdown_table(heads, body)


def entropy_table(part: str) -> str:
    """What became of the entropy of every row."""
    found, body = runs(part), []
    for row in ordered(found, part):
        lost = [step for run in found[row].values() if (step := lost_at(run)) is not None]
        at = f"{median(lost):.0f} ({len(lost)} of {len(found[row])})" if lost else NOTHING
        cells = [shown(found[row], figure) for figure in ("entropy", "in_band", "mixed")]
        body.append([row.label, *cells, at, shown(found[row], "seconds")])
    return markdown_table(["objective", "entropy", "in band", "mixed groups", "lost at step", "s"], body)


def control_table(part: str) -> str:
    """What trim did in every row that has it, and how well its prediction fits; nothing if no row has."""
    found = runs(part)
    rows = [row for row in ordered(found, part) if mean(found[row], "weight") is not None]
    figures = ("entropy", "in_band", "weight", "drive", "leverage", "saturated", "gain", "r2")
    heads = ["objective", "entropy", "in band", "weight", "drive", "leverage", "saturated", "gain", "R^2"]
    body = [[row.label, *(shown(found[row], figure) for figure in figures)] for row in rows]
    return markdown_table(heads, body) if body else ""


LEGEND = (
    "Means over seeds. *Greedy*, *sampled*, *pass@8*: held-out accuracy after the run, with greedy decoding, of 8 "
    "samples per problem, and the share of problems that one of the 8 solves. *Difference*: to the reference, in "
    "percentage points. Runs of one seed have the same problems and the same warm start, so differences are taken seed "
    "by seed. In brackets is the 95 % interval of their mean (paired, Student's t; not corrected for the number of "
    "comparisons). *Same sign*: seeds whose difference has the sign of the mean; a seed that only one of them has is "
    "left out. *Entropy*, *mixed groups* (groups with different rewards): over the last tenth of the steps. *In band*: "
    f"share of the steps with an entropy within {BAND:.0%} of the target, counted from where it first fell to that "
    f"band; an objective without a target is held to that of `trim`. *Lost*: median step at which the run "
    f"[collapsed](alarms.md#the-definition-of-a-collapse) or its entropy fell below {EMPTY:g} nats, and how many did."
)
CONTROL_LEGEND = (
    "*Weight*, *drive*, *leverage*: means over the last tenth of the steps. *Saturated*: share of steps with the "
    "weight at its limit. *Gain* and *R^2*: of a line through what updates did to the entropy of their own "
    "tokens, over what was predicted."
)


def not_run(part: str) -> str:
    """What stands where a part has no result."""
    return f"Not run yet; `benchmarks/laboratory.py {part}` does it."


def section(part: str) -> str:
    """The tables of a part, its reference and its origin."""
    found = result(part)
    if found is None:
        return not_run(part)
    tables = filter(None, (accuracy_table(part), entropy_table(part), control_table(part)))
    return "\n\n".join([*tables, f"The reference is `{_reference(part)}`. {_origin(found)}"])


def _origin(found: Mapping[str, Any]) -> str:
    """Say what a part's runs were made with."""
    settings = "".join(f", `{each}`" for each in found["settings"])
    # A part may have been continued on another machine.
    versions = sorted({run.get("torch", found["versions"]["torch"]) for run in found["runs"].values()})
    where = f"{found['machine']}, torch {' and '.join(versions)}; {found['date']}."
    return f"Recipe `{found['recipe']}`{settings}; {where}"


def rare_tokens(part: str = "spurious-tokens") -> str:
    """The table of what updates do to rare rewarded tokens, beside other tokens; of the first run that has it."""
    found = (result(part) or {"runs": {}})["runs"].values()
    rare = next((run["rare"] for run in found if "rare" in run), None)
    if rare is None:
        return not_run(part)
    body = [
        [f"{kind}, {bound}" if kind in ("spurious", "rare, A < 0") else kind, str(row["count"]),
         number(row["median p"], 5), number(row["median entropy"], 2), f"{row['raised']:+.3f}",
         percent(row["share of squared norms"]), *(number(row.get(name), 2) for name in ("before", "after"))]
        for bound, kinds in rare.items()
        for kind, row in kinds.items()
        if isinstance(row, dict)
    ]  # fmt: skip
    heads = [
        "tokens",
        "count",
        "median p",
        "median entropy",
        "ln p changed by",
        "of squared gradient norms",
        "used before",
        "used after",
    ]
    return markdown_table(heads, body)


def truncation(part: str = "truncation") -> str:
    """The table of runs with top-p that score all tokens, or those that it keeps."""
    found = result(part)
    if found is None:
        return not_run(part)
    rows = _rows(found)
    exact, whole = (Row("dapo", f"rollout.exact_truncation={each}") for each in ("true", "false"))
    body = []
    for row, label in ((whole, "the whole vocabulary"), (exact, "the kept tokens")):
        seeds = rows.get(row, {})
        curves = [run["curves"] for run in seeds.values()]
        first = [values[0][1] for curve in curves if (values := curve.get("sampler/mismatch_mean"))]
        entropies = [run["entropy"] for run in seeds.values() if "entropy" in run]
        difference = paired(seeds, rows.get(whole, {})) if row == exact else None
        cells = [fmean(first) if first else None, mean(seeds, "mismatch"), fmean(entropies) if entropies else None]
        means = [shown(seeds, figure) for figure in ("greedy", "sampled", "pass@8")]
        lost = sum(lost_at(run) is not None for run in seeds.values())
        body.append([label, str(len(seeds)), *map(_small, cells), *means, points(difference), str(lost)])
    heads = ["scored over", "seeds", "mismatch, first steps", "mismatch, last tenth", "entropy after the run", "greedy"]
    heads += ["sampled", "pass@8", "greedy, difference", "runs lost"]
    return "\n\n".join((markdown_table(heads, body), TRUNCATION_LEGEND, _origin(found)))


def _small(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2g}"


TRUNCATION_LEGEND = (
    "*Mismatch*: mean difference between the log-probs of sampler and trainer per token, in nats. *Entropy after the "
    "run*: over the whole vocabulary in both rows, on held-out problems. The others are explained in "
    "[study.md](study.md)."
)


def others() -> str:
    """Sections of the parts that docs/study.md does not name; nothing if there are none."""
    names = sorted(path.stem.partition("-")[2] for path in RESULTS.glob("laboratory-*.json"))
    parts = [(name, found) for name in names if name not in (*PARTS, *ELSEWHERE) and (found := result(name))]
    return "\n\n".join(f"### {found['what'].capitalize()}\n\n{section(name)}" for name, found in parts)


def control(part: str = FIRST) -> str:
    """The table of what trim did, with its legend; for docs/trim.md."""
    table = control_table(part) if result(part) else ""
    return f"{table}\n\n{CONTROL_LEGEND}" if table else not_run(part)


# Sentences


def contrast(ours: str, theirs: str, part: str = FIRST) -> str:
    """Say by how much one objective differs from another, and whether that is more than chance; nothing if not run."""
    found = runs(part)
    rows = [row for name in (ours, theirs) if (row := named(found, name))]
    difference = paired(found[rows[0]], found[rows[1]]) if len(rows) == 2 else None
    if difference is None:
        return ""
    both = set(found[rows[0]]) & set(found[rows[1]])
    ends = [shown({seed: found[row][seed] for seed in both}, "greedy") for row in rows]
    better = "better" if difference.mean > 0 else "worse"
    verdict = f"clearly {better}" if difference.clear else "no clear difference"
    return (
        f"`{ours}` ends at {ends[0]}, `{theirs}` at {ends[1]}: {verdict}, {points(difference)} points over "
        f"{difference.pairs} seeds, {difference.agree} of them with this sign."
    )


def findings(part: str = FIRST) -> str:
    """A list of what was found: accuracies compared, and who held the entropy."""
    lines = [each for ours, theirs in CONTRASTS if (each := contrast(ours, theirs, part))]
    held = entropies(part)
    return "\n".join(f"- {line}" for line in [*lines, *([held] if held else [])]) or not_run(part)


def entropies(part: str = FIRST) -> str:
    """Who held the entropy: a sentence over the objectives of the picture; nothing if none was run."""
    rows = shown_rows((*SHOWN, "dapo + entropy_bonus"), part)
    said = [
        f"`{name}` {shown(seeds, 'entropy')} nats ({shown(seeds, 'in_band')} of steps in band)"
        for name, seeds in rows.items()
    ]
    return f"Entropy at the end, with a target of {target(part):g} nats: {'; '.join(said)}." if said else ""


def target(part: str = FIRST) -> float:
    """Return the target that a part's runs are held to."""
    return common_target(run for seeds in runs(part).values() for run in seeds.values())


def shown_rows(names: Iterable[str] = SHOWN, part: str = FIRST) -> dict[str, dict[int, Run]]:
    """Return the runs of those of the objectives that were run, by name."""
    found = runs(part)
    return {name: found[row] for name in names if (row := named(found, name))}


def picture(folder: str = "") -> str:
    """The picture of entropy and accuracy, and what it shows."""
    found = shown_rows()
    if not found:
        return not_run(FIRST)
    ends = [
        f"{SHOWN[name]} at {shown(seeds, 'entropy')} nats and {shown(seeds, 'greedy')}" for name, seeds in found.items()
    ]
    counts = " to ".join(map(str, sorted({min(map(len, found.values())), max(map(len, found.values()))})))
    return (
        f"![Entropy and held-out accuracy by step, for {len(ends)} objectives]({folder}laboratory.svg)\n\n"
        "A tiny model learns countdown, to reach a number with given ones, on a CPU: mean and 95 % band over "
        f"{counts} seeds. The dashed line is the entropy to hold. Entropy and held-out accuracy "
        f"at the end: {'; '.join(ends)}."
    )


def readme() -> str:
    """The first picture of the README; before the first part is run, that of the stress tests."""
    if shown_rows():
        return picture("docs/")
    return (
        "![Seeds that survive, by method and learning rate](docs/study.svg)\n\n"
        "The picture counts the seeds, out of three, that survive a learning rate (SmolLM2-135M)."
    )


def fact(part: str, row: str, figure: str) -> str:
    """One figure of one row, as it stands in a sentence: `expression / dapo + trim / greedy`.

    `difference` is that of the accuracy to the reference, `difference, seeds 8 to 12` that of some seeds alone.
    """
    found = runs(part)
    place = named(found, row)
    if place is None:
        return "(not run yet)"
    figure, _, some = figure.partition(", seeds ")
    if figure != "difference":
        return shown(found[place], figure)
    other = against(place, found, part)
    first, last = map(int, some.split(" to ")) if some else (0, max(found[place]))
    ours = {seed: run for seed, run in found[place].items() if first <= seed <= last}
    return f"{points(paired(ours, found[other]) if other else None)} points"
