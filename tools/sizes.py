"""Keeps the house small: the sizes of files and functions, and how long the tests are beside the code."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).parent.parent
FILE_MEDIAN, FILE_MOST, FUNCTION_P90 = 160, 500, 40


def lengths(folder: str) -> dict[str, int]:
    """Lines of every Python file under a folder."""
    return {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in sorted((ROOT / folder).rglob("*.py"))}


def function_lengths(folder: str) -> list[int]:
    """Lines of every function under a folder."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    trees = [ast.parse(path.read_text()) for path in (ROOT / folder).rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, kinds)]
    return [(node.end_lineno or node.lineno) - node.lineno + 1 for node in nodes]


def main() -> int:
    """Print the figures and what is over its limit."""
    code, tests = lengths("src"), lengths("tests")
    files = [n for name, n in code.items() if not name.endswith("__init__.py")]
    p90 = quantiles(function_lengths("src"), n=10)[-1]
    faults = [f"{name} has {n} lines, more than {FILE_MOST}" for name, n in {**code, **tests}.items() if n > FILE_MOST]
    if median(files) > FILE_MEDIAN:
        faults.append(f"the median file has {median(files):g} lines, more than {FILE_MEDIAN}")
    if p90 > FUNCTION_P90:
        faults.append(f"a tenth of the functions have more than {p90:g} lines, over {FUNCTION_P90}")
    if sum(tests.values()) < sum(code.values()):
        faults.append(f"tests have {sum(tests.values())} lines, the code {sum(code.values())}")
    print(
        f"sizes: {sum(code.values())} lines of code (median file {median(files):g}, longest {max(files)}, "
        f"function p90 {p90:g}), {sum(tests.values())} of tests"
    )
    for fault in faults:
        print(f"sizes: {fault}")
    return len(faults)


if __name__ == "__main__":
    sys.exit(main())
