"""A package is entered by its `__init__`, and no program of ours hides a package of others."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

from transformers.utils import import_utils

import trimtab

ROOT = Path(__file__).parent.parent
SOURCE = Path(trimtab.__file__).parent


ROOMS_OF_PACKAGES = ("trainer", "experiments")  # each package or module in them is entered by itself


def package_of(parts: Sequence[str]) -> tuple[str, ...]:
    """The package that a module or a file belongs to, from its names below trimtab."""
    return tuple(parts[:2] if parts[0] in ROOMS_OF_PACKAGES else parts[:1])


def inside_imports(path: Path) -> list[str]:
    """Imports of modules (not packages) that belong to another package of trimtab."""
    own = package_of(path.relative_to(SOURCE).parts)
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            parts = name.split(".")
            package = package_of(parts[1:]) if len(parts) > 1 else ()
            deep = parts[0] == "trimtab" and package != own and tuple(parts[1:]) != package
            if deep and not SOURCE.joinpath(*parts[1:]).is_dir():
                found.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {name}")
    return found


def test_no_module_imports_the_inside_of_another_package() -> None:
    paths = [path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py"]
    assert [line for path in paths for line in inside_imports(path)] == []


def test_no_program_of_ours_has_the_name_of_a_package_that_transformers_looks_for() -> None:
    # pytest puts these folders on the import path, where `kernels.py` was taken for the package `kernels`.
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["pythonpath"]
    ours = {path.stem for folder in folders for path in (ROOT / folder).iterdir()}
    looked_for = set(re.findall(r'_is_package_available\(\s*"(\w+)"', Path(import_utils.__file__).read_text()))
    assert "kernels" in looked_for
    assert ours & looked_for == set()
