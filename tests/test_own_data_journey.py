"""docs/own-data.md from its first line to a trained model, with its own blocks and commands; only the model is tiny."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.hostile.model_folders import base_model
from trimtab.cli import app

PAGE = (Path(__file__).parent.parent / "docs/own-data.md").read_text()
MODEL = "Qwen/Qwen3-1.7B-Base"
SHORT = ["run.steps=2", "rollout.samples=4", "rollout.max_new_tokens=8", "run.eval_every=1", "run.device=cpu"]


def trimtab(words: list[str]) -> str:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model that reads any text; the current folder has the files of the page."""
    monkeypatch.chdir(tmp_path)
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(code, "docs/own-data.md", "exec"), {})
    return str(base_model(tmp_path / "model"))


def commands() -> dict[str, list[str]]:
    """The page's commands by their second word, and whether they only look."""
    lines = re.findall(r"^trimtab ((?:init|train) .*)$", PAGE, re.MULTILINE)
    return {line.split()[0] + " --dry-run" * ("--dry-run" in line): shlex.split(line) for line in lines}


def test_the_pages_recipe_is_written_checked_and_trained(model: str) -> None:
    found = commands()
    assert found.keys() == {"init", "train --dry-run"}
    written = trimtab([model if word == MODEL else word for word in found["init"]])
    assert "the longest of" in written and "math" in written
    settings = [word for setting in SHORT for word in ("--set", setting)]
    looked = trimtab([*found["train --dry-run"], *settings])
    assert "as the model reads it" in looked and "Put the answer in \\boxed{}" in looked
    train = [word for word in found["train --dry-run"] if word != "--dry-run"]
    ended = trimtab([*train, *settings])
    assert "2 of 2 steps" in ended and "on problems it was not trained on" in ended
    (folder,) = Path("runs").iterdir()
    last = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][-1]
    assert last["step"] == 2 and {"eval/accuracy", "reward/mean"} <= last.keys()
    assert folder.name in trimtab(["runs"])


def test_the_recipe_that_the_page_shows_trains_too(model: str) -> None:
    (recipe, *_) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert MODEL in recipe
    Path("mine.toml").write_text(recipe.replace(MODEL, "model"))
    settings = [word for setting in SHORT for word in ("--set", setting)]
    assert "2 of 2 steps" in trimtab(["train", "mine.toml", *settings])
