"""Writes the docs that are made from the code and from results; with --check, says which are out of date instead."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from trimtab.objectives.handbook import handbook
from trimtab.train.handbook import recipes_page

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"


def costs() -> str:
    """The README's table of what the methods cost beside GRPO."""
    names = ("stapo", "stare", "sspo")
    lines = ["| ratio to GRPO | " + " | ".join(name.upper() for name in names) + " |", "|---" * 4 + "|"]
    for path in sorted(RESULTS.glob("objectives-*.json")):
        result = json.loads(path.read_text())
        cells = [f"{result['ratios'][name]['ratio']:.2f}" for name in names]
        lines.append(f"| {result['machine']}, torch {result['versions']['torch']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def comparison() -> str:
    """The README's table of the methods on the demo, as `trimtab compare` wrote it."""
    path = RESULTS / "compare-demo.md"
    return path.read_text().strip() if path.exists() else ""


def smollm2() -> str:
    """The README's table of the runs of a real language model."""
    lines = [
        "| task | before RL | after RL | sampled, first and last 5 steps | steps | minutes of RL |",
        "|---" * 6 + "|",
    ]
    for path in sorted(RESULTS.glob("smollm2-*.json")):
        result = json.loads(path.read_text())
        sampled = [value for _, value in result["curves"]["reward/accuracy"]]
        first, last = sum(sampled[:5]) / 5, sum(sampled[-5:]) / 5
        lines.append(
            f"| {result['task']} | {result['accuracy_before_rl']:.1%} | {result['accuracy_after_rl']:.1%} "
            f"| {first:.1%}, {last:.1%} | {result['rl_steps']} | {result['rl_seconds'] / 60:.1f} |"
        )
    return "\n".join(lines)


def readme() -> str:
    """The README with its measured parts filled in."""
    text = (ROOT / "README.md").read_text()
    for name, make in {"costs": costs, "compare": comparison, "smollm2": smollm2}.items():
        text = re.sub(
            rf"(<!-- {name}:[^>]*-->\n).*?(<!-- end -->)", rf"\g<1>{make()}\n\g<2>", text, count=1, flags=re.DOTALL
        )
    return text


PAGES: dict[str, Callable[[], str]] = {
    "docs/methods.md": handbook,
    "docs/recipes.md": recipes_page,
    "README.md": readme,
}


def main() -> int:
    """Write or compare every page."""
    stale = []
    for name, make in PAGES.items():
        path, text = ROOT / name, make()
        if "--check" not in sys.argv:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            stale.append(name)
    if stale:
        print(f"out of date: {', '.join(stale)}; run `make docs` and commit the result")
    return len(stale)


if __name__ == "__main__":
    sys.exit(main())
