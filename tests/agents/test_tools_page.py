"""docs/tools.md: its tool and its environment are run as written, and its tables are complete."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.agents.tokenizers_of_models import CHATML, converse, hermes, small_tokenizer
from helpers.hostile.model_folders import base_model
from trimtab.agents import CALL_FORMATS, ENDED, OUTCOMES, ReplyTemplate, ToolSet
from trimtab.cli import app
from trimtab.data import Problem, user, worked_solutions

PAGE = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of the page, in the current folder."""
    for name, code in re.findall(r"<!-- file: (.*?) -->\n```py\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("files")
def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "docs/tools.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == [
        "ok: 37.5",
        "ok: Paris",
        "exception: Error: KeyError: 'Mars'",
        "ok: too high",
        "bad_arguments: Error: the argument number is 'seven', which is no integer. guess takes (number: integer)",
    ]


@pytest.mark.usefixtures("files")
def test_the_environment_plays_and_pays() -> None:
    tools = ToolSet(environment="python:my_env:Guess")
    problem = Problem(user("Find my number."), "7", "exact", "game")
    template = ReplyTemplate(small_tokenizer(CHATML), tools)
    assert template.prompts([problem])[0][-1]["content"].endswith("I think of a number from 1 to 100.")
    said = [hermes("guess", number=9), hermes("guess", number=7), "It is 7."]
    conversation, _ = converse(tools, template, said, problem=problem)
    assert [call.text for call in conversation.calls] == ["too high", "right"] and conversation.reward == 0.5
    tools.close()


@pytest.mark.usefixtures("files")
def test_the_environment_can_be_called_in_the_plain_format() -> None:
    tools = ToolSet(environment="python:my_env:Guess")
    problem = Problem(user("Find my number."), "7", "exact", "game")
    template = ReplyTemplate(small_tokenizer(CHATML), tools, call_format="plain")
    conversation, _ = converse(
        tools, template, ["guess(9)", "guess(number)", "guess( 7 )", "It is 7."], problem=problem
    )
    assert [call.outcome for call in conversation.calls] == ["ok", "bad_arguments", "ok"]
    assert [conversation.calls[n].text for n in (0, 2)] == ["too high", "right"]
    assert conversation.reward == 0.5
    tools.close()


def test_the_worked_solution_of_the_page_is_one(tmp_path: Path) -> None:
    (line,) = re.findall(r"<!-- file: worked.jsonl -->\n```json\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "worked.jsonl").write_text(line)
    columns = {"prompt": "question", "solution": "worked"}
    (problem,) = worked_solutions(str(tmp_path / "worked.jsonl"), "", columns)
    assert [message["role"] for message in problem.solution or ()] == ["assistant", "tool", "assistant"]


def test_the_tables_are_complete() -> None:
    for name, sentence in {**OUTCOMES, **ENDED}.items():
        assert f"| `{name}` | {sentence} |" in PAGE
    for call_format in CALL_FORMATS:
        assert f"| `{call_format}` |" in PAGE


def train(recipe: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *settings: str) -> list[dict[str, float]]:
    """Train a tiny model for two steps with a recipe of the page, and return the metrics of the steps."""
    monkeypatch.chdir(folder)
    base_model(folder / "model")
    more = '[objective]\nname = "grpo"\n[model]\npath = "model"\n'
    (folder / "mine.toml").write_text(f"{recipe}\n{more}")
    short = ["run.steps=2", "run.eval_every=0", "rollout.prompts=2", "rollout.samples=2", "rollout.max_new_tokens=12"]
    short += ["rollout.max_prompt_tokens=4096", "rollout.max_observation_tokens=16", "run.device=cpu", *settings]
    words = [word for setting in short for word in ("--set", setting)]
    done = CliRunner().invoke(app, ["train", "mine.toml", "--out", "run", *words])
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("files")
def test_the_recipe_of_the_page_trains_with_its_tool_and_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)[0]
    rows = [{"prompt": "Find my number.", "reward_model": {"ground_truth": str(n)}} for n in (7, 42)]
    (tmp_path / "game.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = train(f'{recipe}name = "file"\npath = "game.jsonl"\n', tmp_path, monkeypatch)
    assert [step["step"] for step in steps] == [1, 2]
    assert all({"tools/calls", "conversation/called_share"} <= step.keys() for step in steps)


@pytest.mark.usefixtures("files")
def test_the_warm_start_of_the_page_trains_on_its_worked_solution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)[1]
    (line,) = re.findall(r"<!-- file: worked.jsonl -->\n```json\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "worked.jsonl").write_text(line)
    (tmp_path / "sums.jsonl").write_text(json.dumps({"prompt": "12*34=", "reward_model": {"ground_truth": "408"}}))
    task = '[task]\nname = "file"\npath = "sums.jsonl"\n'
    steps = train(f"{recipe}{task}", tmp_path, monkeypatch, "warm_start.steps=2", "warm_start.batch_size=2")
    assert steps[-1]["step"] == 2 and (tmp_path / "run/model").is_dir()
