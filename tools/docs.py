"""Writes the docs that are made from the code; with --check, says which are out of date instead."""

from __future__ import annotations

import sys
from pathlib import Path

from trimtab.objectives.handbook import handbook

ROOT = Path(__file__).parent.parent
PAGES = {"docs/methods.md": handbook}


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
