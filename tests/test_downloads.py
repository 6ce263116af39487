"""What `make test` downloads is pinned, checked against hashes, and runs no install scripts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAKEFILE = (ROOT / "Makefile").read_text()
# The one line that may install without hashes: versions of tomorrow have none yet.
NEWEST = "$(NEWEST)/bin/python -m pip install --quiet '$(TORCH)' pytest pytest-xdist hypothesis --editable ."
REQUIREMENTS = sorted((ROOT / "requirements").glob("*.txt"))


@pytest.mark.parametrize("path", REQUIREMENTS, ids=lambda path: path.stem)
def test_every_python_package_has_one_version_and_a_hash(path: Path) -> None:
    entries = path.read_text().replace("\\\n", " ").splitlines()
    assert entries
    wrong = [e for e in entries if not re.fullmatch(r"[\w.\[\]-]+==\S+( ;.*?)?( +--hash=sha256:[0-9a-f]{64})+", e)]
    assert not wrong


def test_pip_installs_only_with_hashes_but_for_torch_the_project_and_the_newest_versions() -> None:
    commands = [line.strip() for line in MAKEFILE.splitlines() if "pip install" in line]
    assert len(commands) == 5
    for command in commands:
        if command == NEWEST:
            continue
        if command.endswith(" torch"):
            assert "--constraint" in command
        elif command.endswith("--editable ."):
            assert "--no-deps --no-build-isolation" in command
        else:
            assert "--no-deps --require-hashes" in command


def test_only_test_newest_installs_without_hashes_and_make_test_does_not_call_it() -> None:
    rules = dict(re.findall(r"^([^\t#\n:=]+):((?!=).*\n(?:\t.*\n|\n(?=\t))*)", MAKEFILE, re.MULTILINE))
    assert [target for target, rule in rules.items() if NEWEST in rule] == ["test-newest"]
    assert MAKEFILE.count(NEWEST) == 1
    assert [target for target, rule in rules.items() if "test-newest" in rule] == [".PHONY"]


@pytest.mark.parametrize("constraints", ["constraints.txt", "constraints-vllm.txt"])
def test_the_version_of_torch_is_pinned(constraints: str) -> None:
    assert re.search(r"^torch==[\d.]+$", (ROOT / constraints).read_text(), re.MULTILINE)


def test_npm_packages_have_hashes_and_their_scripts_are_not_run() -> None:
    packages = json.loads((ROOT / "requirements/npm/package-lock.json").read_text())["packages"]
    named = {name: package for name, package in packages.items() if name}
    assert named
    assert all(package["integrity"].startswith("sha512-") for package in named.values())
    npm = [line for line in MAKEFILE.splitlines() if re.search(r"\bnpm (install|ci|i)\b", line)]
    assert len(npm) == 1
    assert "npm ci --ignore-scripts" in npm[0]
