"""What a release is made of agrees with itself: version, changelog, workflows, hooks, extras, links."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
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


def built(folder: Path, **variables: str) -> Message:
    """Build the wheel and return its metadata."""
    source = folder / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GITHUB_")}
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder,
        source,
    ]
    subprocess.run(command, env=environment | variables, check=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(files.read(name))


def links(markdown: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", markdown)


def test_links_on_pypi_lead_to_files_of_the_commit_that_was_released(tmp_path: Path) -> None:
    metadata = built(tmp_path, GITHUB_REPOSITORY="someone/trimtab", GITHUB_SHA="0123abc")
    shown = links(metadata.get_payload())
    assert len(shown) == len(links((ROOT / "README.md").read_text())) > 5
    start = re.compile(r"https://github\.com/someone/trimtab/(blob|raw)/0123abc/")
    ours = [link for link in shown if start.match(link)]
    assert [link for link in shown if link not in ours and not link.startswith("https://")] == []
    assert [link for link in ours if not (ROOT / start.sub("", link)).exists()] == []
    pictures = [link for link in ours if link.endswith(".svg")]
    assert pictures and pictures == [link for link in ours if "/raw/" in link]  # a blob is a page, not a picture
    assert all("https://github.com/someone/trimtab" in each for each in metadata.get_all("Project-URL"))


def test_a_wheel_from_anywhere_else_has_no_dead_links(tmp_path: Path) -> None:
    metadata = built(tmp_path)
    assert [link for link in links(metadata.get_payload()) if not link.startswith("https://")] == []
    assert "All documentation: guides" in metadata.get_payload()
    assert metadata.get_all("Project-URL") is None


def test_every_extra_for_users_is_tried_by_the_installation_benchmark() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    assert extras - {"dev", "site"} == {*install.USES, *install.RESOLVED} - {install.CORE}


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks/results").glob("install-*.json")), ids=lambda p: p.stem)
def test_the_installation_was_measured_and_what_was_not_is_named(path: Path) -> None:
    for environment in json.loads(path.read_text())["environments"]:
        measured, to_do = environment["extras"], environment.get("to_do", [])  # of a run that was stopped
        assert {*measured, *to_do} == {*install.USES, *install.RESOLVED}
        assert [name for name, of in measured.items() if "error" in of] == []
        start = environment["start"]["cpu_seconds_beyond_python"]
        assert start["--help"] < 0.3
        assert max(start.values()) < 1


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
