"""A run does not go on with other data or another base model than it began with, and is not mixed with such runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from helpers.train.short_runs import contents, short_run, trained
from trimtab.cli import app
from trimtab.experiments.grid import ProcessPool
from trimtab.trainer.model import load_policy
from trimtab.trainer.train import Run, RunFolder, open_policy, read_inputs, resolved_toml, train
from trimtab.trainer.train.build import input_changes, run_inputs

ROWS = [("1+1=", "2"), ("2+3=", "5"), ("4+4=", "8"), ("7-2=", "5")]
STEPS = {"run.steps": "2", "run.checkpoint_every": "1", "run.eval_every": "0", "record.enabled": "false"}


def write_rows(path: Path, rows: list[tuple[str, str]], **more: str) -> None:
    path.write_text("".join(json.dumps({"prompt": a, "answer": b, **more}) + "\n" for a, b in rows))


def on_data(path: Path, **more: str) -> dict[str, Any]:
    task = {"task.size": None, "task.digits": None, "task.name": "file", "task.path": str(path)}
    columns = {"task.columns.prompt": "prompt", "task.columns.answer": "answer"}
    return {**STEPS, **task, **columns, "task.rule": "math", "warm_start.steps": "0", **more}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_rows(tmp_path / "data.jsonl", ROWS)
    return tmp_path / "data.jsonl"


def resumed(run: Path, changes: dict[str, Any]) -> None:
    train(short_run(run, {**changes, "run.steps": "3"}, resume=True)[0])


@pytest.mark.parametrize("rows", [ROWS[:3], [*ROWS[:3], ("7-2=", "6")], ROWS[::-1]], ids=["fewer", "answer", "order"])
def test_a_run_is_not_resumed_on_other_rows(rows: list[tuple[str, str]], data: Path, tmp_path: Path) -> None:
    trained(tmp_path / "run", on_data(data))
    before = contents(tmp_path / "run")
    write_rows(data, rows)
    with pytest.raises(ValueError, match=r"other inputs:\n  data \(.*data\.jsonl\): .*\n.*--out FOLDER"):
        resumed(tmp_path / "run", on_data(data))
    assert contents(tmp_path / "run") == before
    write_rows(data, ROWS)
    resumed(tmp_path / "run", on_data(data))


def test_the_way_out_is_a_command_that_a_shell_takes(data: Path, tmp_path: Path) -> None:
    trained(tmp_path / "my run", on_data(data))
    write_rows(data, ROWS[:2])
    with pytest.raises(ValueError, match=r"with them: trimtab train '.*my run/config\.toml' --out FOLDER"):
        resumed(tmp_path / "my run", on_data(data))


def test_the_same_rows_in_a_file_with_another_column_are_the_same_data(data: Path, tmp_path: Path) -> None:
    trained(tmp_path / "run", on_data(data))
    write_rows(data, ROWS, comment="of no use")
    resumed(tmp_path / "run", on_data(data))


def test_other_held_out_rows_are_noticed(data: Path, tmp_path: Path) -> None:
    changes = on_data(data, **{"task.eval_path": str(tmp_path / "eval.jsonl")})
    write_rows(tmp_path / "eval.jsonl", ROWS[:2])
    trained(tmp_path / "run", changes)
    write_rows(tmp_path / "eval.jsonl", ROWS[2:])
    with pytest.raises(ValueError, match=r"held-out data \(.*eval\.jsonl\)"):
        resumed(tmp_path / "run", changes)


def save_model(folder: Path, seed: int) -> None:
    policy = load_policy("demo", device="cpu", seed=seed)
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)


@pytest.fixture
def on_model(tmp_path: Path) -> dict[str, Any]:
    save_model(tmp_path / "base", 0)
    return {**STEPS, "model.path": str(tmp_path / "base"), "warm_start.steps": "0"}


def test_a_lora_run_is_not_resumed_on_another_base_model(on_model: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    lora = {**on_model, "model.lora_rank": "2"}
    trained(tmp_path / "run", lora)
    save_model(tmp_path / "base", 1)
    with pytest.raises(ValueError, match=r"other inputs:\n  model \(.*base\)"):
        resumed(tmp_path / "run", lora)
    for name in ("run", "run@1"):  # nor evaluated, exported or trained further
        with pytest.raises(ValueError, match=r"belong to .*base as it was"):
            open_policy(str(tmp_path / name), device="cpu")
    start = {**lora, "model.start_from": str(tmp_path / "run" / "checkpoints" / "step-00000002")}
    with pytest.raises(ValueError, match=r"belong to .*base as it was"):
        trained(tmp_path / "new", start)
    save_model(tmp_path / "base", 0)
    resumed(tmp_path / "run", lora)


def test_another_reference_model_is_noticed(on_model: dict[str, Any], tmp_path: Path) -> None:
    save_model(tmp_path / "reference", 1)
    changes = {**on_model, "model.reference": str(tmp_path / "reference"), "objective": '"grpo + kl"'}
    trained(tmp_path / "run", changes)
    save_model(tmp_path / "reference", 2)
    with pytest.raises(ValueError, match=r"reference model \(.*reference\)"):
        resumed(tmp_path / "run", changes)


def test_a_run_of_an_earlier_version_is_resumed_and_its_inputs_are_noted(data: Path, tmp_path: Path) -> None:
    trained(tmp_path / "run", on_data(data))
    noted = read_inputs(tmp_path / "run")
    (tmp_path / "run" / "inputs.json").unlink()
    resumed(tmp_path / "run", on_data(data))
    assert read_inputs(tmp_path / "run") == noted and "data" in noted


@pytest.mark.parametrize("text", ["{", "[1]", "[" * 10_000, '"words"'])
def test_damaged_inputs_are_an_error_in_words(text: str, data: Path, tmp_path: Path) -> None:
    trained(tmp_path / "run", on_data(data))
    (tmp_path / "run" / "inputs.json").write_text(text)
    with pytest.raises(ValueError, match=r"inputs\.json is damaged: remove it"):
        resumed(tmp_path / "run", on_data(data))


def test_what_the_recipe_generates_has_no_hash(tmp_path: Path) -> None:
    run, _ = trained(tmp_path / "run", STEPS)
    assert read_inputs(tmp_path / "run") == {}
    assert input_changes({"data": "1"}, run_inputs(run.config, (run.trainer.task, None)), run.config) == []


@pytest.mark.parametrize("command", [["compare"], ["stress", "--axis", "update.lr=1e-3"]], ids=["compare", "stress"])
def test_runs_on_old_and_new_data_are_not_mixed(
    command: list[str], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "mine.toml"
    # A stress test refuses runs that are too short to be judged.
    config, _ = short_run(tmp_path / "x", {**on_data(data), "objective": '"dapo"', "run.steps": "11"})
    recipe.write_text(resolved_toml(config.config))

    def train_all(pool: Any) -> list[Any]:
        for run in pool.runs:
            train(Run(run.config, RunFolder(run.folder.path), config.reporter))
        raise ValueError("trained")

    monkeypatch.setattr(ProcessPool, "run", train_all)
    words = [command[0], "dapo", *command[1:], "--recipe", str(recipe), "--seeds", "1", "--out", str(tmp_path / "out")]
    first = CliRunner().invoke(app, words)
    assert "trained" in first.output, first.output
    write_rows(data, ROWS[:2])
    second = CliRunner().invoke(app, words)
    assert second.exit_code == 2 and "other data; choose another --out" in second.output
    assert "data (" in second.output and "trained" not in second.output


def test_weights_that_are_trained_whole_are_evaluated_without_their_base(tmp_path: Path) -> None:
    trained(tmp_path / "run", STEPS)
    assert torch.isfinite(next(open_policy(str(tmp_path / "run@1"), device="cpu").model.parameters())).all()
