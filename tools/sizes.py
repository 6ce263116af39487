"""Check that the code stays small and explained: sizes of files, functions and folders, comments, tests beside code."""

from __future__ import annotations

import ast
import sys
import tokenize
from collections import Counter
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).parent.parent
FILE_MEDIAN, FILE_MOST, FUNCTION_P90 = 160, 500, 40
MODULES_MOST = 16  # at one level of a package, __init__ included
COMMENTS_LEAST = 0.04  # of all lines of code


def lengths(folder: str) -> dict[str, int]:
    """Lines of every Python file under a folder."""
    return {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in sorted((ROOT / folder).rglob("*.py"))}


def function_lengths(folder: str) -> list[int]:
    """Lines of every function under a folder."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    trees = [ast.parse(path.read_text()) for path in (ROOT / folder).rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, kinds)]
    return [(node.end_lineno or node.lineno) - node.lineno + 1 for node in nodes]


def comment_share(folder: str) -> float:
    """Return the fraction of lines that hold a comment."""
    commented = lines = 0
    for path in (ROOT / folder).rglob("*.py"):
        with tokenize.open(path) as file:
            tokens = tokenize.generate_tokens(file.readline)
            commented += len({token.start[0] for token in tokens if token.type == tokenize.COMMENT})
        lines += len(path.read_text().splitlines())
    return commented / lines


def main() -> int:
    """Print the figures and what is over its limit."""
    code, tests = lengths("src"), lengths("tests")
    files = [n for name, n in code.items() if not name.endswith("__init__.py")]
    p90 = quantiles(function_lengths("src"), n=10)[-1]
    long = {name: n for name, n in {**code, **tests}.items() if n > FILE_MOST}
    problems = [f"{name} has {n} lines, more than {FILE_MOST}" for name, n in long.items()]
    if median(files) > FILE_MEDIAN:
        problems.append(f"the median file has {median(files):g} lines, more than {FILE_MEDIAN}")
    if p90 > FUNCTION_P90:
        problems.append(f"a tenth of the functions have more than {p90:g} lines, over {FUNCTION_P90}")
    if sum(tests.values()) < sum(code.values()):
        problems.append(f"tests have {sum(tests.values())} lines, the code {sum(code.values())}")
    folders = Counter(str(Path(name).parent) for name in code)
    problems += [f"{name} has {n} modules, more than {MODULES_MOST}" for name, n in folders.items() if n > MODULES_MOST]
    comments = comment_share("src")
    if comments < COMMENTS_LEAST:
        problems.append(f"{comments:.1%} of the lines have a comment, fewer than {COMMENTS_LEAST:.0%}")
    print(
        f"sizes: {sum(code.values())} lines of code (median file {median(files):g}, longest {max(files)}, "
        f"function p90 {p90:g}, comments on {comments:.1%}), {sum(tests.values())} of tests"
    )
    for problem in problems:
        print(f"sizes: {problem}")
    return len(problems)


if __name__ == "__main__":
    sys.exit(main())
