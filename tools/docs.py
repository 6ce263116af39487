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


def readme() -> str:
    """The README with its measured parts filled in."""
    text = (ROOT / "README.md").read_text()
    return re.sub(r"(<!-- costs[^>]*-->\n).*?(<!-- end -->)", rf"\g<1>{costs()}\n\g<2>", text, flags=re.DOTALL)


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
