"""Data of one's own: columns by name in training, evaluation and the warm start."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trimtab.trainer.config import load
from trimtab.trainer.train import check_problems
from trimtab.trainer.train.warm_start import worked_problems

WriteFile = Callable[[str, str], Path]
RECIPE = """
[task]
name = "file"
path = "train.jsonl"
eval_path = "test.jsonl"
rule = "number"
suffix = " Box it."
columns = { prompt = "question", answer = "result.value", system = "who", source = "subject" }
[model]
path = "demo-tools"

[warm_start]
steps = 3
path = "worked.jsonl"
columns = { prompt = "question", solution = "how", system = "who" }
"""
ROW = {"question": "1+1?", "result": {"value": 2}, "who": "Be brief.", "subject": "sums", "how": "Count to 2."}


def rows(*given: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in given)


@pytest.fixture
def recipe(own_file: WriteFile) -> Path:
    own_file("train.jsonl", rows(ROW, ROW))
    own_file("test.jsonl", rows(ROW))
    own_file("worked.jsonl", rows(ROW, {**ROW, "question": [{"role": "user", "content": "2+2?"}]}))
    return own_file("mine.toml", RECIPE)


def test_columns_system_messages_and_the_suffix_hold_everywhere(recipe: Path) -> None:
    config = load(recipe)
    train, test = check_problems(config)
    prompt = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1? Box it."})
    assert test is not None
    for problem in (train[0], test[0]):
        assert (problem.prompt, problem.answer, problem.rule, problem.source) == (prompt, "2", "number", "sums")
    first, second = worked_problems(config, train)[0], worked_problems(config, train)[1]
    assert (first.prompt, first.solution) == (prompt, "Count to 2.")
    assert second.prompt == (prompt[0], {"role": "user", "content": "2+2? Box it."})


def test_worked_solutions_may_be_a_column_of_the_task_itself(recipe: Path) -> None:
    config = load(recipe, ["warm_start.path=none", "task.columns.solution=how"])
    train, _ = check_problems(config)
    assert worked_problems(config, train)[0].solution == "Count to 2."
    with pytest.raises(ValueError, match=r"has no worked solutions: set warm_start\.path .*task\.columns\.solution"):
        check_problems(load(recipe, ["warm_start.path=none"]))


def test_another_task_drops_the_options_of_the_recipes_task(recipe: Path) -> None:
    config = load(recipe, ["task.name=arithmetic", "task.digits=3", "warm_start.path=none"])
    assert config.task.arguments["digits"] == 3 and "suffix" not in config.task.arguments
    with pytest.raises(
        ValueError, match=r"unknown key task\.digits: it is an option of arithmetic; the task 'file' has"
    ):
        load(recipe, ["task.digits=3"])
