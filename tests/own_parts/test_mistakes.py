# ruff: noqa: E501  (the lists of mistakes are tables)
"""Mistakes in a file of one's own and in its recipe: each gives one good line before anything is loaded."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trimtab.cli import app

WriteFile = Callable[[str, str], Path]
EXAMPLE = Path(__file__).parents[2] / "examples" / "own_parts"
ROWS = '{"question": "1+1=", "result": "2"}\n'
FILE = "[task]\nname = 'file'\npath = 'rows.jsonl'\ncolumns = {prompt = 'question', answer = 'result'}\n"

# What is replaced in mine.py, by what, and what is said.
IN_THE_FILE = {
    "syntax": ("def gentle(", "def gentle((", "mine.py:16: SyntaxError: "),
    "no import": ("import trimtab as tt\n", "\n", "mine.py:16: NameError: name 'tt' is not defined"),
    "no such module": ("import trimtab as tt", "import trimtab as tt, tirmtab", "mine.py:9: ModuleNotFoundError: No module"),
    "no default": ('"share of DAPO\'s clip range"] = 0.5)', '"x"])', "'softness' needs a default: arguments are options"),
    "no objective": ("return tt.objective(\"dapo\"", "tt.objective(\"dapo\"", "it returned None, and a method is an Objective"),
    "another method": ('"dapo"', '"dapoo"', "mine.py:20: ValueError: unknown method 'dapoo': did you mean dapo"),
    "a token rule": ("builder.logp <", "builder.logpp <", "mine.py:27: AttributeError: 'PlanBuilder' object has no attr"),
    "a shape": ("(sums / counts)[group]", "(sums / counts)[group].sum(), 1", "mine.py:33: it returned (tensor("),
    "no problems": ("for index in range(size):", "for index in []:", "mine.py:40: it has no problems"),
    "a prompt": ('user(f"{number}+{number}=")', 'f"{number}+{number}="', "the prompt of problem 0 is '1+1=': chat mess"),
    "an answer": ("answer = str(2 * number)", "answer = 2 * number", "`answer` of problem 0 is 2, and not text"),
    "a crash": ("str(2 * number)", "str(number / 0)", "mine.py:46: ZeroDivisionError: division by zero"),
    "a rule": ("rule=\"python:mine:near", "rule=\"python:mine:naer", "mine.py has no naer: did you mean near"),
    "a rule's arguments": ("answer: str, extra: dict[str, object]", "answer: str", "must take (response, answer, extra)"),
    "no solution": (", solution=answer)", ")", "has no worked solutions: set warm_start.path"),
    "no sample": ("def sample(", "def smaple(", "it has no method sample(prompts, step, options)"),
    "no policy": ("policy: Policy, factor: float = 1.2", "", "a sampler's first argument is the policy, and it has none"),
}  # fmt: skip

# What is replaced in mine.toml, by what, and what is said; the key is named first.
IN_THE_RECIPE = {
    "a name": ("python:mine:gentle +", "python:mine:gentel +", "objective: python:mine:gentel: project/mine.py has no gentel: did"),
    "a module": ("python:mine:gentle +", "python:nine:gentle +", "objective: python:nine:gentle: there is no module nine in"),
    "a method": ("python:mine:gentle +", "gentle +", "objective: unknown method 'gentle': there are"),
    "an attachment": ("+ python:mine:calm", "+ python:mine:gentle", "it returns an Objective, so it is a method: write it first"),
    "an option": ("softness = 0.8", "sofness = 0.8", "objective: unknown option of python:mine:gentle + python:mine:calm 'sofness': did you mean softness?"),
    "its type": ("softness = 0.8", "softness = 'high'", "objective: python:mine:gentle: option softness='high' must be a number"),
    "its range": ("softness = 0.8", "softness = 3", "objective: python:mine:gentle: project/mine.py:19: ValueError: softness=3.0 must be above 0"),
    "an advantage": ("python:mine:above_mean", "python:mine:above", "objective: python:mine:above: project/mine.py has no above: did"),
    "a task": ("python:mine:doubling", "python:mine:dubbling", "task.name: python:mine:dubbling: project/mine.py has no dubbling: did"),
    "another task": ("python:mine:doubling", "doubling", "task.name: unknown task 'doubling': there are arithmetic,"),
    "a task's option": ("digits = 1", "digit = 1", "unknown key task.digit: did you mean digits?"),
    "another's option": ("digits = 1", "suffix = 'x'", "unknown key task.suffix: it is an option of gsm8k and file; the task 'python:mine:doubling' has name, environment, digits, size"),
    "its value": ("digits = 1", "digits = 'one'", "task.digits = 'one': must be a whole number"),
    "a sampler": ("python:mine:Warmer", "python:mine:Warm", "rollout.engine_options: python:mine:Warm: project/mine.py has no Warm: did"),
    "a sampler's option": ("factor = 1.1", "facto = 1.1", "unknown option of rollout.engine_options 'facto': did you mean factor?"),
    "another engine": ("python:mine:Warmer", "vlm", "rollout.engine: 'vlm': did you mean vllm? (one of your own: python:MODULE:NAME)"),
    "no module name": ("python:mine:Warmer", "python:Warmer", "python:Warmer: nothing of this name is registered here"),
    "a rule's option": ("most = 2", "mots = 2", "reward.terms.brief: python:mine:brief (project/mine.py:58) has no option 'mots'"),
    "a key of others": ("[run]", "[update]\nlearning_rate = 1e-3\n[run]", "unknown key update.learning_rate: did you mean lr?"),
    "a rule": ("[task]\nname = \"python:mine:doubling\"\ndigits = 1\n", FILE + "rule = 'python:mine:nea'\n", "task.rule: python:mine:nea: project/mine.py has no nea: did"),
    "a column": ("[task]\nname = \"python:mine:doubling\"\ndigits = 1\n", FILE.replace("prompt =", "promt ="), "task.columns: no problem has a 'promt': did you mean prompt?"),
    "a column's name": ("[task]\nname = \"python:mine:doubling\"\ndigits = 1\n", FILE.replace("'result'", "'answer'"), "rows.jsonl, row 1: there is no `answer`, only `question`, `result`; name your columns in the recipe"),
    "a solution": ("steps = 20\n", "steps = 20\npath = 'rows.jsonl'\ncolumns = {prompt = 'question'}\n", "rows.jsonl, row 1: there is no `solution`, only"),
}  # fmt: skip


def problem_of(*command: str) -> str:
    done = CliRunner().invoke(app, ["train", "project/mine.toml", *command])
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.strip().splitlines()
    return line.removeprefix("trimtab: ")


@pytest.fixture
def project(own_file: WriteFile, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(EXAMPLE, tmp_path / "project"))
    (folder / "rows.jsonl").write_text(ROWS)
    return folder


def replace_once(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) >= 1, old
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize("mistake", IN_THE_FILE)
def test_a_mistake_in_the_file(project: Path, mistake: str) -> None:
    old, new, message = IN_THE_FILE[mistake]
    replace_once(project / "mine.py", old, new)
    assert message in problem_of("--dry-run")


@pytest.mark.parametrize("mistake", IN_THE_RECIPE)
def test_a_mistake_in_the_recipe(project: Path, mistake: str) -> None:
    old, new, message = IN_THE_RECIPE[mistake]
    replace_once(project / "mine.toml", old, new)
    assert message in problem_of("--dry-run")


def test_a_wrong_rule_is_found_before_the_warm_start_and_leaves_nothing(project: Path) -> None:
    replace_once(project / "mine.py", "python:mine:near", "python:mine:naer")
    assert "mine.py has no naer: did you mean near" in problem_of("--out", "run", "--quiet")
    assert not Path("run").exists()
    assert not Path(".warm_start").exists()
