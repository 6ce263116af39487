"""A package is entered by its `__init__`: no module imports the inside of another package."""

from __future__ import annotations

import ast
from pathlib import Path

import trimtab

SOURCE = Path(trimtab.__file__).parent


def inside_imports(path: Path) -> list[str]:
    """Imports of modules (not packages) that belong to another package of trimtab."""
    own = path.relative_to(SOURCE).parts[0]
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            parts = name.split(".")
            deep = parts[0] == "trimtab" and len(parts) > 2 and parts[1] != own
            if deep and not SOURCE.joinpath(*parts[1:]).is_dir():
                found.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {name}")
    return found


def test_no_module_imports_the_inside_of_another_package() -> None:
    paths = [path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py"]
    assert [line for path in paths for line in inside_imports(path)] == []
