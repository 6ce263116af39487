"""`trimtab init` writes a recipe from a file of problems, and `trimtab train` takes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from trimtab.cli import app
from trimtab.cli import init_recipe as module
from trimtab.trainer.config import Config, load
from trimtab.trainer.memory import DeviceMemory


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(*rows: Mapping[str, Any], name: str = "data.jsonl") -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def init(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["init", *arguments])


def recipe_of(*arguments: str) -> Config:
    done = init(*arguments)
    assert done.exit_code == 0, done.output
    return load("mine.toml")


def on_gpu(monkeypatch: pytest.MonkeyPatch, fits: Callable[[Config], bool]) -> None:
    """Stand on a machine with a GPU into which these configurations fit."""
    monkeypatch.setattr(module, "visible_gpu", lambda device: DeviceMemory("NVIDIA X", 8 << 30, 8 << 30))
    monkeypatch.setattr(module, "fits", lambda config, gpu: fits(config))


def test_the_recipe_passes_a_dry_run() -> None:
    data = write({"question": "What is 1+1?", "result": 2}, {"question": "What is 1/2 + 1?", "result": "\\frac32"})
    held_out = write({"question": "What is 3+1?", "result": 4}, name="held_out.jsonl")
    done = init(data, "--held-out", held_out, "--model", "./mine")
    assert done.exit_code == 0
    for shown in ("prompt     column question: 'What is 1+1?'", "answer     column result: 2", "rule       math: "):
        assert shown in done.output
    dry = CliRunner().invoke(app, ["train", "mine.toml", "--dry-run"])
    assert dry.exit_code == 0, dry.output
    assert "2 problems" in dry.output and "no estimate" in dry.output
    config = load("mine.toml")
    assert config.task.arguments["eval_path"] == str(Path(held_out).resolve())
    assert config.task.arguments["suffix"].endswith("\\boxed{}.")
    assert (config.rollout.prompts, config.update.per_step) == (2, 2)


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"prompt": "1+1?", "reward_model": {"ground_truth": "2"}}, ("prompt", "reward_model.ground_truth")),
        ({"prompt": [{"role": "user", "content": "1+1?"}], "answer": "2"}, ("prompt", "answer")),
        ({"id": 7, "problem": "1+1?", "solution": "2"}, ("problem", "solution")),
        ({"text": "1+1?", "label": 2, "output": "of a model"}, ("text", "label")),
    ],
)
def test_columns_are_found_by_their_names(row: dict[str, Any], columns: tuple[str, str]) -> None:
    found = recipe_of(write(row)).task.arguments["columns"]
    assert (found["prompt"], found["answer"]) == columns


@pytest.mark.parametrize(("problems", "sizes"), [(1, (1, 1)), (3, (2, 2)), (63, (62, 2)), (65, (64, 2))])
def test_any_number_of_problems_gives_a_recipe_that_can_be_trained(problems: int, sizes: tuple[int, int]) -> None:
    config = recipe_of(write(*({"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(problems))))
    assert (config.rollout.prompts, config.update.per_step) == sizes
    done = CliRunner().invoke(app, ["train", "mine.toml", "--dry-run"])
    assert done.exit_code == 0, done.output


def test_columns_that_are_not_found_are_asked_for() -> None:
    data = write({"frage": "1+1?", "antwort": {"wert": 2}})
    done = init(data)
    assert done.exit_code == 2
    assert "no column looks like the prompt: name it with --prompt" in done.output
    assert "'frage', 'antwort', 'antwort.wert'" in done.output
    assert not Path("mine.toml").exists()
    found = recipe_of(data, "--prompt", "frage", "--answer", "antwort.wert").task.arguments["columns"]
    assert found == {"prompt": "frage", "answer": "antwort.wert"}


def test_a_column_of_several_lines_forges_no_line() -> None:
    done = init(
        write({"q\ntrimtab: all is well\x1b[2J": "1+1?", "answer": "2"}), "--prompt", "q\ntrimtab: all is well\x1b[2J"
    )
    assert done.exit_code == 0 and "\ntrimtab: all is well" not in done.output and "\x1b" not in done.output
    assert "prompt     column q\\ntrimtab: all is well\\x1b[2J: '1+1?'" in done.output


@pytest.mark.parametrize(
    ("answers", "rule"),
    [
        (["A", "(c)", "B"], "choice"),
        (["42", "-3/4", "1,000"], "math"),
        (["x^2+1", "\\sqrt{2}", "(0, 1]"], "math"),
        (["Paris", "Rome"], "boxed"),
        (["It depends on who asks, on when they ask, and on what they did before."], "boxed"),
    ],
)
def test_the_rule_follows_from_the_answers(answers: list[str], rule: str) -> None:
    proposed, why = module.propose_rule(answers)
    assert proposed == rule
    if len(answers[0]) < 20 and rule != "choice":
        assert why.endswith(f"of {len(answers)} in a box it takes {len(answers)} as right")


def test_gsm8k_is_recognised() -> None:
    config = recipe_of(write({"question": "1+1?", "answer": "It is two.\n#### 2"}))
    assert config.task.name == "gsm8k"


def test_a_prompt_that_asks_for_a_box_gets_no_suffix() -> None:
    config = recipe_of(write({"prompt": "1+1? Put it in \\boxed{}.", "answer": "2"}))
    assert config.task.arguments["suffix"] == ""


def test_long_prompts_get_room() -> None:
    assert recipe_of(write({"prompt": "1+" * 4000 + "1", "answer": "4001"})).rollout.max_prompt_tokens == 4096


@pytest.mark.parametrize(
    ("fits", "budget", "lora_rank", "lr", "told"),
    [
        (lambda config: True, 32_768, 0, 1e-6, "micro-batches of 32,768 tokens; estimated to fit into NVIDIA X"),
        (lambda config: config.update.token_budget <= 8192, 8192, 0, 1e-6, "micro-batches of 8,192 tokens;"),
        (lambda config: config.model.lora_rank > 0, 32_768, 16, 1e-5, "LoRA of rank 16: all weights do not fit"),
        (lambda config: False, 32_768, 0, 1e-6, "which do not fit into NVIDIA X"),
    ],
)
def test_sizes_fit_into_the_gpu(
    fits: Callable[[Config], bool], budget: int, lora_rank: int, lr: float, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu(monkeypatch, fits)
    done = init(write({"prompt": "1+1?", "answer": "2"}))
    assert told in done.output
    config = load("mine.toml")
    assert (config.update.token_budget, config.model.lora_rank, config.update.lr) == (budget, lora_rank, lr)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no.jsonl",), "'no.jsonl' does not exist"),
        (("empty.jsonl",), "empty.jsonl has no rows"),
        (("data.jsonl", "--out", "mine.yaml"), "ends in .toml"),
        (("bad.jsonl",), "bad.jsonl, row 2: `answer` is empty"),
        (("data.jsonl", "--out", "there.toml"), "there.toml exists already"),
    ],
)
def test_what_cannot_be_written_is_refused(arguments: tuple[str, ...], message: str) -> None:
    write(name="empty.jsonl")
    write({"prompt": "1+1?", "answer": "2"})
    write({"prompt": "1+1?", "answer": "2"}, {"prompt": "1+1?", "answer": ""}, name="bad.jsonl")
    Path("there.toml").write_text("mine")
    done = init(*arguments)
    assert done.exit_code == 2 and message in done.output
    assert not Path("mine.toml").exists() and Path("there.toml").read_text() == "mine"
