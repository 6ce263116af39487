"""What a release is made of agrees with itself: version, changelog, workflows, hooks, extras, links."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import install
import trimtab

ROOT = Path(__file__).parent.parent
MAKEFILE = (ROOT / "Makefile").read_text()


def test_citation_and_changelog_have_the_version() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == trimtab.__version__
    assert re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == trimtab.__version__


@pytest.mark.parametrize("name", ["CHANGELOG.md", "docs/support.md"])
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert targets
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_extra_for_users_is_tried_by_the_installation_benchmark() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    # vLLM brings another torch, and has an environment of its own (make test-vllm).
    assert extras - {"dev", "site", "vllm"} == set(install.USES) - {install.CORE}


def test_workflows_call_targets_and_files_that_there_are() -> None:
    workflows = "".join(path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml"))
    ends = re.findall(r"end: (\w+)", workflows)
    for target in re.findall(r"run: make ([\w-]+)", workflows):
        for name in [f"{target}{end}" for end in ends] if target.endswith("-") else [target]:
            assert re.search(rf"^{name}:", MAKEFILE, re.MULTILINE), name
    for script in re.findall(r"python ([\w/]+\.py)", workflows):
        assert (ROOT / script).exists()


def test_hooks_run_the_tools_of_make_check() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    hooked = {" ".join(hook["entry"].split()[:2]).replace(".venv/bin/", "").removesuffix(" --check") for hook in hooks}
    body = re.search(r"^check: .*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert body
    commands = {" ".join(line.split()[:2]).replace("$(BIN)/", "") for line in body[1].splitlines()}
    assert {command for command in commands if not command.startswith("check-jsonschema")} == hooked
