"""State how far the rule for a collapse (`trimtab.record.collapse`) agrees with curves labelled by eye."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from trimtab.record import find_collapse, merge_curves

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Judged:
    """A run, its label by eye (collapsed, alive, unsure) with the step, and the step of the collapse by the rule."""

    run: str
    label: str
    label_step: int | None
    rule_step: int | None

    @property
    def rule(self) -> str:
        """Return the rule's word for the run."""
        return "alive" if self.rule_step is None else "collapsed"


def judged_runs() -> list[Judged]:
    """Return every labelled run with what the rule says about it."""
    stability = json.loads((RESULTS / "stability-h200.json").read_text())["runs"]
    curves = {(run["objective"], run["lr"], run["seed"]): run["curves"] for run in stability}
    judged = []
    for label in json.loads((RESULTS / "collapse-labels.json").read_text())["labels"]:
        key = label["objective"], label["lr"], label["seed"]
        found = find_collapse(merge_curves(label.get("curves") or curves[key]))
        name = f"{label['source']} {key[0]} {key[1]:g} seed {key[2]}"
        judged.append(Judged(name, label["label"], label["step"], found.step if found else None))
    return judged


def kappa(pairs: list[tuple[str, str]]) -> float:
    """Return Cohen's kappa: agreement above what two independent raters with these shares would reach."""
    count = len(pairs)
    agreed = sum(a == b for a, b in pairs) / count
    words = {word for pair in pairs for word in pair}
    chance = sum(
        sum(a == word for a, _ in pairs) / count * (sum(b == word for _, b in pairs) / count) for word in words
    )
    return (agreed - chance) / (1 - chance)


def main() -> None:
    """Print the agreement and every run on which rule and label do not agree."""
    judged = judged_runs()
    sure = [each for each in judged if each.label != "unsure"]
    pairs = [(each.label, each.rule) for each in sure]
    print(f"{sum(a == b for a, b in pairs)} of {len(sure)} labels agree, kappa {kappa(pairs):.2f}")
    for each in judged:
        if each.label != each.rule:
            print(f"{each.run}: {each.label} by eye, {each.rule} by the rule")
    late = sorted(each.rule_step - each.label_step for each in sure if each.rule_step and each.label_step)
    print(f"the rule's step is {late[len(late) // 2]} after the label's at the median ({late[0]} to {late[-1]})")


if __name__ == "__main__":
    main()
