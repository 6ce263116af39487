"""The demo model, which is the default, is refused for prompts that it cannot read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trimtab.cli import app


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_a_recipe_without_a_model_is_refused_for_prompts_in_words(tmp_path: Path, flags: list[str]) -> None:
    rows = [{"prompt": "2+2=", "answer": "4"}, {"prompt": "What is 6 * 7?", "answer": "42"}]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "mine.toml"
    columns = 'columns = { prompt = "prompt", answer = "answer" }'
    recipe.write_text(f'[task]\nname = "file"\npath = "{tmp_path}/sums.jsonl"\n{columns}\n')
    result = CliRunner().invoke(app, ["train", str(recipe), "--out", str(tmp_path / "run"), *flags])
    assert result.exit_code == 2
    assert "sums.jsonl, row 2: the prompt has 'W', which model.path = 'demo' does not know" in result.stderr
    assert "Set model.path to a model of yours" in result.stderr
    assert not (tmp_path / "run").exists()
