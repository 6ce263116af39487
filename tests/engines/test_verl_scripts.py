"""The cluster scripts: every override is one that verl has, trimtab takes them, and the numbers are the recipes'."""

from __future__ import annotations

import helpers.engines.verl_quiet  # noqa: F401  # isort: skip

import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.utils.import_utils import load_module

import verl_gpu
from helpers.engines.verl_configs import composed
from trimtab.engines.verl.options import check_config, read_options
from trimtab.engines.verl.planning import minibatch_rows
from trimtab.engines.verl.plugin import command_problem
from trimtab.trainer.config import build_objective

SCRIPTS = Path(__file__).parents[2] / "scripts" / "verl"
RECIPES = {
    "stapo_qwen3.sh 1.7B": ("stapo-qwen3-1.7b", 64),
    "stapo_qwen3.sh 8B": ("stapo-qwen3-8b", 64),
    "stapo_qwen3.sh 14B": ("stapo-qwen3-14b", 64),
    "stare_qwen2.5_math_7b.sh": ("stare-short-7b", 16),
    "sspo_qwen2.5_math_1.5b.sh": ("sspo-qwen2.5-math-1.5b", 8),
}


def arguments(command: str, folder: Path, *more: str) -> list[str]:
    """What a script hands to Python, as bash expands it."""
    script, *words = command.split()
    echo = folder / "echo"
    echo.write_text(f"#!{sys.executable}\nimport sys\nprint('\\n'.join(sys.argv[1:]))\n")
    echo.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(echo), "TRAIN": "/data/train.parquet", "OUT": "/runs/one"}
    done = subprocess.run(
        ["bash", str(SCRIPTS / script), *words, *more], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def recipe(name: str) -> dict[str, Any]:
    return tomllib.loads((files("trimtab") / "recipes" / f"{name}.toml").read_text())


def test_every_script_is_tested() -> None:
    assert {path.name for path in SCRIPTS.glob("*.sh")} == {command.split()[0] for command in RECIPES}


@pytest.mark.parametrize("script", list(RECIPES))
def test_a_script_is_its_recipe_in_verls_options(script: str, tmp_path: Path) -> None:
    module, name, *overrides = arguments(script, tmp_path)
    assert (module, name) == ("-m", "verl.trainer.main_ppo")
    assert command_problem(overrides) == ""
    config = composed(overrides)  # a key that verl does not have is an error here
    options = read_options(OmegaConf.to_container(config.trimtab, resolve=True))
    objective = build_objective(options.objective)
    check_config(config, options, objective)

    wanted, gpus = recipe(RECIPES[script][0]), RECIPES[script][1]
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert objective.explain() == build_objective(wanted["objective"]).explain()
    sampling, update, run = wanted["rollout"], wanted["update"], wanted["run"]
    assert config.data.train_batch_size == sampling["prompts"]
    assert rollout.n == sampling["samples"]
    assert config.data.max_prompt_length == sampling["max_prompt_tokens"]
    assert config.data.max_response_length == sampling["max_new_tokens"]
    assert (rollout.temperature, rollout.top_p) == (sampling["temperature"], sampling["top_p"])
    assert config.algorithm.filter_groups.enable == sampling.get("dynamic_sampling", False)
    assert actor.ppo_mini_batch_size * update["per_step"] == sampling["prompts"]
    assert actor.optim.lr == update["lr"]
    assert actor.optim.lr_warmup_steps == update.get("warmup_steps", 0)
    assert actor.optim.weight_decay == update.get("weight_decay", 0)
    assert actor.optim.clip_grad == update["max_grad_norm"]
    assert actor.ppo_max_token_len_per_gpu == update["token_budget"]
    assert config.actor_rollout_ref.model.path == wanted["model"]["path"]
    assert config.trainer.total_training_steps == run["steps"]
    assert config.trainer.save_freq == run["checkpoint_every"]
    assert config.trainer.nnodes * config.trainer.n_gpus_per_node == gpus
    given = OmegaConf.to_container(config.reward.custom_reward_function.reward_kwargs)
    assert given == {"rule": wanted["task"]["rule"], **wanted["reward"]}
    responses = sampling["prompts"] * sampling["samples"]
    updates = minibatch_rows(responses, actor.ppo_mini_batch_size * rollout.n, gpus)
    assert len(updates) == update["per_step"]


def test_further_arguments_are_passed_to_verl(tmp_path: Path) -> None:
    said = arguments("stapo_qwen3.sh 8B", tmp_path, "trainer.nnodes=4", "+trimtab.mask=rare")
    config = composed(said[2:])
    assert config.trainer.nnodes == 4
    assert build_objective({"name": "stapo", "mask": config.trimtab.mask})


@pytest.mark.parametrize("eager", [True, False])
def test_the_settings_of_the_benchmark_on_a_gpu_are_verls_and_are_accepted(tmp_path: Path, eager: bool) -> None:
    settings = verl_gpu.overrides(tmp_path, 3, prompts=64, samples=8, tokens=256, trimtab=True, eager=eager)
    config = composed(settings)
    assert command_problem(settings) == ""
    check_config(config, read_options({"objective": "stapo"}), build_objective({"name": "stapo"}))
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.enforce_eager, config.actor_rollout_ref.actor.use_torch_compile) == (eager, not eager)
    assert rollout.max_model_len == rollout.prompt_length + rollout.response_length


@pytest.mark.parametrize(
    ("words", "said"),
    [(["8B"], "TRAIN: a parquet file"), (["9B"], "the size is 1.7B, 8B or 14B, not 9B"), ([], "the size: 1.7B, 8B")],
)
def test_a_script_names_what_is_missing(words: list[str], said: str) -> None:
    command = ["bash", str(SCRIPTS / "stapo_qwen3.sh"), *words]
    done = subprocess.run(command, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert said in done.stderr


def test_verl_finds_the_grader_and_it_grades() -> None:
    score = load_module("pkg://trimtab.engines.verl.reward").compute_score
    right = score("math", r"so it is \boxed{42}", 42, extra_info=None, rule="boxed", correct=1.0, wrong=-1.0)
    wrong = score("math", r"so it is \boxed{41}", "42", rule="boxed", wrong=-1.0)
    nothing = score("math", "I do not know", "42", rule="boxed", wrong=-1.0)
    assert (right["score"], right["acc"], right["pred"]) == (1.0, 1.0, "42")
    assert (wrong["score"], wrong["acc"], wrong["pred"]) == (-1.0, 0.0, "41")
    assert (nothing["score"], nothing["pred"]) == (-1.0, "")


def test_a_rule_with_numbers_gives_verl_the_number_and_a_failing_one_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    score = load_module("pkg://trimtab.engines.verl.reward").compute_score
    rule = "python:helpers.grading.graded_rules:returns"
    assert score("math", "0.3", "42", rule=rule, wrong=-1.0) == {"score": 0.3, "acc": 0.0, "pred": ""}
    assert [score("math", "nan", "42", rule=rule, wrong=-1.0)["score"] for _ in range(2)] == [-1.0, -1.0]
    (record,) = [each for each in caplog.records if "failed" in each.message]
    assert rule in record.message and "nan is no verdict" in record.message
