"""Examples on the pages: Python runs, recipes are recipes, and every command line is one that trimtab takes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner

import trimtab as tt
from trimtab.cli import app
from trimtab.trainer.config import load, parse_stored, parse_toml

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HERE = ("own-data", "own-reward", "plan-then-loss", "rewards", "theory")
# Pages whose Python has a test of its own, beside the tests of what they are about.
ELSEWHERE = (
    "agents",
    "gpu",
    "more-signal",
    "objectives",
    "own-parts",
    "record",
    "sandbox",
    "start",
    "tools",
    "tools-engines",
)


def blocks(page: Path, language: str) -> list[str]:
    # All blocks are read, or the end of one would be taken for the start of the next.
    found = re.findall(r"^ *```(\w*)[^\n`]*\n(.*?)^ *```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [text for of, text in found if of == language]


def command_lines(page: Path) -> list[str]:
    """Return the command lines of a page's blocks, with lines that end in a backslash joined."""
    text = "\n".join([*blocks(page, ""), *blocks(page, "bash"), *blocks(page, "console")])
    lines = text.replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ") for line in lines if re.match(r"(\$ )?trimtab [a-z]", line) and "..." not in line]


@pytest.mark.parametrize("name", HERE)
def test_the_python_of_a_page_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": name}
    for code in blocks(ROOT / f"docs/{name}.md", "python"):
        exec(compile(code, f"docs/{name}.md", "exec"), names)


def test_every_page_with_python_is_run_somewhere() -> None:
    assert {page.stem for page in PAGES if blocks(page, "python")} <= {*HERE, *ELSEWHERE, "verl"}


def test_verls_data_are_made_as_its_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": [{"role": "user", "content": text}], "answer": "4"} for text in ("2+2?", "2+2?", "1+3?")]
    pq.write_table(pa.Table.from_pylist(rows), "dapo-math-17k.parquet")
    (code,) = blocks(ROOT / "docs/verl.md", "python")
    exec(compile(code, "docs/verl.md", "exec"), {})
    made = [row["prompt"][-1]["content"] for row in pq.read_table("train.parquet").to_pylist()]
    assert len(made) == 2 and all(text.endswith("\\boxed{}") for text in made)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_recipes_of_a_page_are_recipes(page: Path) -> None:
    for block in blocks(page, "toml"):
        parse_stored(parse_toml(block))


def test_what_is_wrong_in_a_recipe_would_be_noticed() -> None:
    with pytest.raises(ValueError, match="lora_rank"):
        parse_stored(parse_toml("[model]\nlora_rang = 16"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page_are_commands(page: Path) -> None:
    group = typer.main.get_command(app)
    for line in command_lines(page):
        words = shlex.split(re.split(r" [|<>&]", line)[0], comments=True)[1:]
        command = group.commands[words[0]]  # type: ignore[attr-defined]
        given = command.make_context(words[0], words[1:], resilient_parsing=False).params
        # Keys are checked against the recipe that the command names, where it comes with trimtab.
        recipe = str(given.get("recipe") or "demo")
        load("addition" if recipe.endswith(".toml") else recipe, given.get("settings") or [])
        for name in given.get("objectives") or []:
            if not name.startswith("python:") and name != "recorded":
                tt.objective(name)


def test_a_wrong_command_would_be_noticed() -> None:
    command = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
    with pytest.raises(Exception, match="--dry-rum"):
        command.make_context("train", ["demo", "--dry-rum"])


def test_the_rule_of_the_guide_grades_as_the_guide_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs/own-reward.md"
    monkeypatch.chdir(tmp_path)
    (rules,) = blocks(page, "py")
    (tmp_path / "my_rules.py").write_text(rules)
    (line,) = [line for block in blocks(page, "bash") for line in block.splitlines() if "trimtab grade" in line]
    pair, rule = re.fullmatch(r"echo '(.*)' \| trimtab grade --rule (\S+)", line).groups()  # type: ignore[union-attr]
    result = CliRunner().invoke(app, ["grade", "--rule", rule], input=pair + "\n")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["score"] == 0.5
    # The page's other rule works in the same command, where the number of tokens is not known.
    result = CliRunner().invoke(app, ["grade", "--rule", rule.replace("near", "brief")], input=pair + "\n")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["score"] == 1.0
