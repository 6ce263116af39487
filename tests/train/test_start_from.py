"""A new run from another run's checkpoint: other settings, whole models and LoRA, and models named by their run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from helpers.train.short_runs import MessageLog, contents, differences, short_run, trained
from trimtab.cli import app
from trimtab.cli.launch import resolve_request
from trimtab.data import Problem
from trimtab.trainer.config import base_model, find_run_model, load
from trimtab.trainer.model import Policy, load_policy
from trimtab.trainer.train import RunFolder, build_policy, open_policy
from trimtab.trainer.train.loop import train
from trimtab.trainer.train.prompts import encode_prompts
from trimtab.trainer.train.run import Run

LORA = {"model.lora_rank": "2", "model.lora_targets": '["q_proj", "down_proj"]', "warm_start.steps": "0"}
KEPT = {"run.keep_checkpoints": "9"}
HALF = "update.lr=1.5e-3"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of six steps that trained the whole model."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    trained(folder, KEPT)
    return folder


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of six steps that trained adapters."""
    folder = tmp_path_factory.mktemp("runs") / "lora"
    trained(folder, LORA | KEPT)
    return folder


def start(out: Path, source: str, *settings: str, keep_optimizer: bool = False) -> tuple[Run, MessageLog]:
    """Train a new run from a checkpoint, for two steps."""
    request = resolve_request(None, ["run.steps=2", *settings], out, None, source, keep_optimizer)
    log = MessageLog()
    new = Run(request.config, RunFolder(out), log)
    train(new)
    return new, log


def saved(run: Path, step: int, file: str = "model") -> dict[str, torch.Tensor]:
    return load_file(run / f"checkpoints/step-{step:08d}/{file}.safetensors")


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def logits(policy: Policy) -> torch.Tensor:
    policy.model.eval()
    with torch.no_grad():
        out: torch.Tensor = policy.model(input_ids=torch.tensor([[2, 5, 9, 4, 3]])).logits
    return out


# --- new runs from a checkpoint


@pytest.mark.parametrize("kind", ["whole", "lora"])
def test_a_run_goes_on_from_a_checkpoint_with_half_the_learning_rate_and_more_samples(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    before: Path = request.getfixturevalue("run" if kind == "whole" else "lora_run")
    new, log = start(tmp_path / "new", f"{before}@4", HALF, "rollout.samples=6")
    assert equal(saved(tmp_path / "new", 0), saved(before, 4))
    assert not saved(tmp_path / "new", 0, "optimizer")
    assert not equal(saved(tmp_path / "new", 2), saved(before, 4))
    assert new.config.update.lr == 1.5e-3 and new.config.rollout.samples == 6
    assert new.config.warm_start.steps == 0
    assert log.has("starts from the weights of step 4 of", str(before))
    # Prompts go on where the other run's were at that step, whatever the number of samples.
    states = [json.loads((path / "state.json").read_text()) for path in (
        before / "checkpoints/step-00000004", tmp_path / "new/checkpoints/step-00000000")]  # fmt: skip
    assert states[0]["progress"]["position"] == states[1]["progress"]["position"] == 16
    assert states[1]["progress"]["step"] == 0


def test_the_optimizer_is_kept_if_asked_for(run: Path, tmp_path: Path) -> None:
    _, log = start(tmp_path / "new", f"{run}@4", HALF, keep_optimizer=True)
    assert equal(saved(tmp_path / "new", 0, "optimizer"), saved(run, 4, "optimizer"))
    assert log.has("starts from the weights and optimizer of step 4")


def test_two_new_runs_from_one_checkpoint_are_equal_to_the_bit(run: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        start(tmp_path / name, f"{run}@4", keep_optimizer=True)
    assert not differences(contents(tmp_path / "a"), contents(tmp_path / "b"))


@pytest.mark.parametrize("kind", ["whole", "lora"])
def test_a_run_from_a_checkpoint_can_be_resumed_after_the_other_run_is_gone(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    before: Path = request.getfixturevalue("run" if kind == "whole" else "lora_run")
    source = Path(shutil.copytree(before, tmp_path / "source"))
    start(tmp_path / "new", f"{source}@4", "run.keep_checkpoints=9")
    whole = contents(tmp_path / "new")
    shutil.rmtree(source)
    shutil.rmtree(tmp_path / "new/checkpoints/step-00000002")
    shutil.rmtree(tmp_path / "new/model")
    resumed = Run(load(tmp_path / "new/config.toml"), RunFolder(tmp_path / "new"), log := MessageLog(), resume=True)
    train(resumed)
    assert log.has("resumed from step 0")
    assert not differences(contents(tmp_path / "new"), whole)


def test_adapters_are_merged_where_the_new_run_trains_other_weights(lora_run: Path, tmp_path: Path) -> None:
    merged = logits(open_policy(f"{lora_run}@4", device="cpu"))
    whole, _ = start(tmp_path / "whole", f"{lora_run}@4", "model.lora_rank=0", "model.lora_targets=[]")
    assert torch.equal(logits(build_policy(whole.config)), merged)
    other, _ = start(tmp_path / "other", f"{lora_run}@4", "model.lora_rank=3")
    assert torch.equal(logits(build_policy(other.config)), merged)  # fresh adapters change nothing yet
    # The demo's weights depend on the seed: another one must not put the adapters on another model.
    seeded, _ = start(tmp_path / "seeded", f"{lora_run}@4", "run.seed=7")
    assert torch.equal(logits(build_policy(seeded.config)), merged)


def test_adapters_can_be_trained_on_a_whole_model_of_another_run(run: Path, tmp_path: Path) -> None:
    start(tmp_path / "new", f"{run}@4", "model.lora_rank=2")
    assert all("lora_" in name for name in saved(tmp_path / "new", 2))
    exported = tmp_path / "exported"
    assert CliRunner().invoke(app, ["export", f"{tmp_path}/new@0", "--out", str(exported)]).exit_code == 0
    assert torch.allclose(
        logits(load_policy(str(exported), device="cpu")), logits(open_policy(f"{run}@4", device="cpu"))
    )


def test_a_run_without_a_step_means_its_newest_checkpoint_and_an_alarms_checkpoint_has_a_step_too(
    run: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    (folder / "checkpoints/step-00000002").rename(tmp_path / "step-00000002")
    (folder / "alarms").mkdir()
    (tmp_path / "step-00000002").rename(folder / "alarms/step-00000002")
    assert resolve_request(None, [], None, None, str(folder)).config.model.start_from == str(
        folder / "checkpoints/step-00000006"
    )
    early = resolve_request(None, [], None, None, f"{folder}@2").config.model.start_from
    assert early == str(folder / "alarms/step-00000002")
    assert resolve_request(None, [], None, None, early).config.model.start_from == early


def test_a_recipe_of_its_own_is_used_with_the_model_of_the_run(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('objective = "grpo"\n[model]\npath = "elsewhere"\n[warm_start]\nsteps = 5\n')
    config = resolve_request(str(tmp_path / "mine.toml"), [], None, None, f"{run}@4").config
    assert (config.objective["name"], config.model.path, config.warm_start.steps) == ("grpo", "demo", 0)


def test_what_cannot_be_started_from_is_refused_in_words(run: Path, tmp_path: Path) -> None:
    for source, words in (
        (f"{run}@5", "no checkpoint of step '5'; those it has are of step 0, 2, 4, 6"),
        (f"{run}@last", "no checkpoint of step 'last'"),
        (str(tmp_path), "neither a run (a folder with config.toml) nor one of its checkpoints"),
        ("demo", "neither a run"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            resolve_request(None, [], None, None, source)
    with pytest.raises(ValueError, match="give one of them"):
        resolve_request(None, [], None, run, str(run))
    with pytest.raises(ValueError, match=r"leave out --set model\.path=x"):
        resolve_request(None, ["model.path=x"], None, None, str(run))
    with pytest.raises(ValueError, match="--keep-optimizer goes with --from"):
        resolve_request(None, [], None, None, None, True)
    with pytest.raises(ValueError, match="trains other weights"):
        resolve_request(None, ["model.lora_rank=2"], None, None, str(run), True)


def test_a_damaged_checkpoint_is_not_started_from(run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    with (folder / "checkpoints/step-00000006/model.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match=r"step-00000006 is damaged: model\.safetensors is not what was saved"):
        start(tmp_path / "new", str(folder))
    assert not (tmp_path / "new").exists()  # and the same command can be used again


def test_the_refusal_to_resume_with_other_settings_names_a_command_that_works(run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    words = ["train", "--resume", str(folder), "--set", HALF, "--set", "objective.name=grpo"]
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2
    command = refused.stderr.strip().splitlines()[-1].partition("start a new run: ")[2]
    assert command.startswith(f"trimtab train --from {folder} --set ") and "--set update.lr=0.0015" in command
    done = CliRunner().invoke(app, [*shlex.split(command)[1:], "--dry-run"])
    assert done.exit_code == 0
    assert "lr = 0.0015" in done.stdout and 'name = "grpo"' in done.stdout


# --- models named by their run


@pytest.mark.parametrize("kind", ["whole", "lora"])
def test_a_model_path_takes_a_run_and_its_checkpoints(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    before: Path = request.getfixturevalue("run" if kind == "whole" else "lora_run")
    newest = logits(open_policy(str(before), device="cpu"))
    assert torch.equal(logits(open_policy(f"{before}@6", device="cpu")), newest)
    early = logits(open_policy(f"{before}@2", device="cpu"))
    assert not torch.equal(early, newest)
    by_folder = load(None, [f"model.path={before}/checkpoints/step-00000002", "run.device=cpu"])
    assert torch.equal(logits(build_policy(by_folder)), early)
    assert base_model(f"{before}@2") == "demo"
    assert find_run_model("demo") is None and find_run_model(str(tmp_path)) is None


def test_the_demo_is_the_demo_whatever_the_current_folder_holds(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run, tmp_path / "demo")
    monkeypatch.chdir(tmp_path)
    assert find_run_model("demo") is None and load(None, ["model.path=demo"]).model.path == "demo"
    assert find_run_model("./demo") is not None


def test_the_reference_model_may_be_a_run(run: Path, tmp_path: Path) -> None:
    changes = {"objective": '"grpo + kl"', "model.reference": f"{run}@2", "run.steps": "1", "warm_start.steps": "0"}
    new, _ = short_run(tmp_path / "new", changes)
    trainer = new.prepare()
    assert trainer.reference is not None
    assert torch.equal(logits(trainer.reference), logits(open_policy(f"{run}@2", device="cpu")))


def test_runs_that_start_from_each_other_are_followed_only_so_far(run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    text = (folder / "config.toml").read_text().replace('path = "demo"', f'path = "{folder}@4"')
    (folder / "config.toml").write_text(text)
    for follow in (base_model, open_policy):
        with pytest.raises(ValueError, match="start from each other"):
            follow(f"{folder}@2")


# --- LoRA


def test_a_relative_base_path_survives_a_change_of_folder(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model by a relative path, trained with adapters, then resumed, evaluated and exported from elsewhere."""
    shutil.copytree(run / "model", tmp_path / "here/models/base")
    monkeypatch.chdir(tmp_path / "here")
    trained(Path("runs/lora"), LORA | {"model.path": "models/base", "run.steps": "2"})
    named = json.loads(Path("runs/lora/model/adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(tmp_path / "here/models/base")
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    policy = open_policy("../here/runs/lora", device="cpu")
    done = CliRunner().invoke(app, ["export", "../here/runs/lora"])
    assert done.exit_code == 0 and "written: ../here/runs/lora/export-2" in done.stdout
    again = load_policy("../here/runs/lora/export-2", device="cpu")
    assert not hasattr(again.model, "peft_config")
    assert torch.equal(logits(again), logits(policy))
    monkeypatch.chdir(tmp_path / "there")
    config = load(Path("../here/runs/lora/config.toml"), ["run.steps=3"])
    train(Run(config, RunFolder(Path("../here/runs/lora")), log := MessageLog(), resume=True))
    assert log.has("resumed from step 2")


def test_an_export_has_the_weights_of_the_run_in_the_precision_asked_for(lora_run: Path, tmp_path: Path) -> None:
    export = ["export", f"{lora_run}@4", "--out", str(tmp_path / "model")]
    assert CliRunner().invoke(app, [*export, "--precision", "bf16"]).exit_code == 0
    weights = load_file(tmp_path / "model/model.safetensors")
    merged = open_policy(f"{lora_run}@4", device="cpu").model.state_dict()
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert all(torch.equal(weight, merged[name].bfloat16()) for name, weight in weights.items())
    for words, problem in (
        (export, "exists already: choose another --out"),
        (["export", "demo"], "neither a run"),
        (["export", f"{lora_run}@5"], "no checkpoint of step '5'"),
        ([*export, "--precision", "int4"], "it must be fp32 or bf16"),
    ):
        refused = CliRunner().invoke(app, words)
        assert refused.exit_code == 2 and problem in refused.stderr


def test_adapters_are_on_the_named_layers_alone(lora_run: Path) -> None:
    names = {name.split(".lora_")[0].rpartition(".")[2] for name in saved(lora_run, 2)}
    assert names == {"q_proj", "down_proj"}
    everywhere = load_policy("demo", device="cpu", lora_rank=2)
    assert len([name for name, p in everywhere.model.named_parameters() if p.requires_grad]) > len(saved(lora_run, 2))


def test_a_wrong_target_names_the_layers_there_are() -> None:
    with pytest.raises(
        ValueError, match=r"model.lora_targets: 'qkv' is no linear layer of the model: down_proj, .*q_proj"
    ):
        load_policy("demo", device="cpu", lora_rank=2, lora_targets=["q_proj", "qkv"])
    for setting in ('model.lora_targets=["q_proj"]', "model.lora_dropout=0.1"):
        with pytest.raises(ValueError, match="lora_targets and lora_dropout need lora_rank"):
            load(None, [setting])


def test_dropout_is_the_same_in_a_resumed_run(tmp_path: Path) -> None:
    changes = LORA | {"model.lora_dropout": "0.3", "warm_start.steps": "2", "run.steps": "4"} | KEPT
    trained(tmp_path / "run", changes)
    whole = contents(tmp_path / "run")
    without = trained(tmp_path / "without", changes | {"model.lora_dropout": "0"})
    assert not equal(saved(tmp_path / "run", 4), saved(without[0].folder.path, 4))
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000004")
    torch.manual_seed(123)  # as another process would have it
    trained(tmp_path / "run", changes, resume=True)
    assert not differences(contents(tmp_path / "run"), whole)


# --- positions


def test_a_prompt_and_response_beyond_the_models_positions_are_refused_before_the_first_step(tmp_path: Path) -> None:
    run, _ = short_run(tmp_path / "run", {"rollout.max_new_tokens": "62"})
    positions = "with rollout.max_new_tokens=62 that is more than the model's 64 positions"
    with pytest.raises(ValueError, match=f"{positions}; set rollout.max_new_tokens to 60 or less"):
        run.prepare()


@pytest.mark.parametrize(
    ("observed", "advice"),
    [
        (0, "remove such problems"),
        (60, "lower rollout.max_turns or rollout.max_observation_tokens, or remove such problems"),
    ],
)
def test_where_no_number_of_new_tokens_would_fit_none_is_advised(observed: int, advice: str) -> None:
    policy = SimpleNamespace(context=4, encode_batch=lambda prompts, *_: [[1] * 4 for _ in prompts])
    tools = SimpleNamespace(max_observed_tokens=observed, prompts=list, schemas=list) if observed else None
    problem = Problem(({"role": "user", "content": "1+1="},), "2", "exact", "made")
    with pytest.raises(ValueError, match=f"more than the model's 4 positions; {advice}$") as caught:
        encode_prompts(policy, [(0, problem)], 10, 5, tools)  # type: ignore[arg-type]
    assert "or less" not in str(caught.value)
