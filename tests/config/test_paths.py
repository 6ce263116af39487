"""Paths in recipes: relative to the recipe's file, or by --set to the current folder, and absolute afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.train.short_runs import MessageLog
from trimtab.trainer.config import Config, load
from trimtab.trainer.train.loop import train
from trimtab.trainer.train.run import Run
from trimtab.trainer.train.run_folder import RunFolder

RECIPE = """
task = { name = "file", path = "train.jsonl", eval_path = ["data/test.jsonl"] }
warm_start = { path = "../worked.jsonl", columns = { prompt = "p", solution = "s" } }
model = { path = "model" }
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a recipe and its data; the current folder is another one."""
    folder = tmp_path / "project"
    (folder / "data").mkdir(parents=True)
    (folder / "model").mkdir()
    (folder / "mine.toml").write_text(RECIPE)
    row = json.dumps({"prompt": "1+1=", "reward_model": {"ground_truth": "2"}}) + "\n"
    for name in ("train.jsonl", "data/test.jsonl"):
        (folder / name).write_text(row)
    (tmp_path / "worked.jsonl").write_text('{"p": "1+1=", "s": "2"}\n')
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return folder


def paths(config: Config) -> list[object]:
    return [config.task.arguments["path"], config.task.arguments["eval_path"], config.warm_start.path]


def test_paths_of_a_recipe_are_relative_to_it_and_absolute_afterwards(project: Path) -> None:
    config = load("../project/mine.toml")
    worked = str(project.parent / "worked.jsonl")
    assert paths(config) == [str(project / "train.jsonl"), [str(project / "data/test.jsonl")], worked]
    assert config.model.path == str(project / "model")


def test_paths_of_settings_are_relative_to_the_current_folder(project: Path) -> None:
    Path("train.jsonl").write_text("")
    Path("other.jsonl").write_text("")
    Path("mine").mkdir()
    given = ['task.path={"train.jsonl"=2, "other.jsonl"=1}', "model.path=mine"]
    config = load(project / "mine.toml", given)
    assert config.task.arguments["path"] == {
        str(Path("train.jsonl").resolve()): 2,
        str(Path("other.jsonl").resolve()): 1,
    }
    assert config.model.path == str(Path("mine").resolve())
    config = load(None, ["task={name='file', path='other.jsonl'}"])
    assert config.task.arguments["path"] == str(Path("other.jsonl").resolve())


@pytest.mark.parametrize("name", ["train.jsonl", "model"])
def test_a_path_that_is_only_in_the_current_folder_is_not_taken_silently(project: Path, name: str) -> None:
    (project / name).rename(Path(name))
    with pytest.raises(ValueError) as error:  # noqa: PT011
        load(project / "mine.toml")
    assert f"relative to its folder, and there is no {project / name}; there is {Path(name).resolve()}" in str(
        error.value
    )


def test_names_on_the_hub_and_built_in_models_are_no_paths(project: Path) -> None:
    config = load(None, ["task.name=file", "task.path=owner/data", "model.path=Qwen/Qwen3-1.7B-Base"])
    assert (config.task.arguments["path"], config.model.path) == ("owner/data", "Qwen/Qwen3-1.7B-Base")
    Path("demo").mkdir()
    assert load(None, ["model.path=demo"]).model.path == "demo"
    (project / "hub.toml").write_text("model = { path = 'owner/name', reference = 'start' }")
    assert load(project / "hub.toml").model.path == "owner/name"


def test_a_missing_path_is_named_where_it_was_looked_for(project: Path) -> None:
    (project / "train.jsonl").unlink()
    assert paths(load(project / "mine.toml"))[0] == str(project / "train.jsonl")
    assert load(None, ["task.name=file", "task.path=no.jsonl"]).task.arguments["path"] == "no.jsonl"


def test_a_run_of_a_recipe_started_elsewhere_is_resumed_from_a_third_folder(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ["rollout.prompts=1", "rollout.samples=2", "rollout.max_new_tokens=2", "run.device=cpu", "run.threads=1"]
    settings = [*small, "model.path=demo", "run.eval_every=1", "run.patience=0"]
    folder = tmp_path / "run"
    train(Run(load("../project/mine.toml", [*settings, "run.steps=1"]), RunFolder(folder), MessageLog()))
    (tmp_path / "third").mkdir()
    monkeypatch.chdir(tmp_path / "third")
    log = MessageLog()
    train(Run(load(folder / "config.toml", ["run.steps=2"]), RunFolder(folder), log, resume=True))
    assert log.has("resumed from step 1")
