"""Check that files and functions stay small enough to read: 500 lines a file, 60 a function."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILE_MOST, FUNCTION_MOST = 500, 60


def long_functions(path: Path, text: str) -> list[str]:
    """Return a sentence about every function of a module that is too long."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    sizes = {
        node.name: (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(ast.parse(text))
        if isinstance(node, kinds) and not node.name.endswith("_kernel")  # a Triton kernel is one function
    }
    over = {name: n for name, n in sizes.items() if n > FUNCTION_MOST}
    return [f"{path}: {name} has {n} lines, more than {FUNCTION_MOST}" for name, n in over.items()]


def main() -> int:
    """Print the number of lines, and what is too long."""
    problems, lines = [], dict.fromkeys(("src", "tests"), 0)
    for folder in lines:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text, name = path.read_text(), path.relative_to(ROOT)
            size = len(text.splitlines())
            lines[folder] += size
            if size > FILE_MOST:
                problems.append(f"{name} has {size} lines, more than {FILE_MOST}")
            if folder == "src":
                problems += long_functions(name, text)
    print(f"sizes: {lines['src']} lines of code, {lines['tests']} of tests")
    for problem in problems:
        print(f"sizes: {problem}")
    return len(problems)


if __name__ == "__main__":
    sys.exit(main())
