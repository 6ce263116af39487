"""The packaged recipes have their papers' numbers, and every setting in their comments works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import trimtab
from recipe_docs import recipe_title, recipes_page
from trimtab.cli.display import PlainReporter
from trimtab.trainer.config import Config, load, packaged_recipes
from trimtab.trainer.train import Run, StopReason
from trimtab.trainer.train.loop import train
from trimtab.trainer.train.run_folder import RunFolder

ROOT = Path(__file__).parent.parent.parent
RECIPES = packaged_recipes()
STAPO = [name for name in RECIPES if name.startswith("stapo-")]
STARE = [name for name in RECIPES if name.startswith("stare-") and name != "stare-tools-7b"]
SSPO = [name for name in RECIPES if name.startswith("sspo-")]
PAPERS = [*STAPO, *STARE, *SSPO, "stare-tools-7b"]


def comment(name: str) -> list[str]:
    """The comment at the start of a recipe."""
    lines = RECIPES[name].read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith("#")]


def settings_in(line: str) -> list[str]:
    """What follows each --set of a line, as a shell reads it."""
    found = re.findall(r"--set ((?:\"[^\"]*\"|'[^']*'|[^\s)])+)", line)
    return [word for text in found for word in shlex.split(text)]


SUGGESTED = [(name, tuple(settings_in(line))) for name in RECIPES for line in comment(name) if "--set" in line]


def minibatch(config: Config) -> int:
    """Responses per update."""
    return config.rollout.prompts * config.rollout.samples // config.update.per_step


def test_all_recipes_are_packaged() -> None:
    assert {*RECIPES} == {
        "demo",
        "addition",
        "agent",
        "countdown",
        "countdown-steps",
        "tools",
        "smollm2",
        "smollm2-tools",
        "smollm2-zero",
        "stapo-qwen3-1.7b",
        "stapo-qwen3-8b",
        "stapo-qwen3-14b",
        "stare-short-7b",
        "stare-short-14b",
        "stare-short-32b",
        "stare-long-1.5b",
        "stare-long-8b",
        "stare-tools-7b",
        "sspo-qwen2.5-math-1.5b",
        "sspo-qwen2.5-math-7b",
    }


def test_recipes_are_in_the_package_and_linked_from_the_root() -> None:
    assert trimtab.__file__ is not None
    inside = Path(trimtab.__file__).parent / "recipes"
    assert all(path.parent == inside for path in RECIPES.values())
    assert (ROOT / "recipes").resolve() == (ROOT / "src/trimtab/recipes").resolve()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_starts_with_paper_hardware_and_baselines(name: str) -> None:
    text = "\n".join(comment(name))
    assert recipe_title(RECIPES[name]).endswith(".")
    assert "# Paper: arXiv " in text
    assert "# Hardware: " in text
    assert any(line.startswith("#   --set objective.name=grpo") for line in comment(name))
    assert max(len(line) for line in RECIPES[name].read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_names_the_paper_of_its_objective(name: str) -> None:
    objective = load(name).build_objective()
    small = {"demo": "dapo + trim", "countdown": "dapo", "countdown-steps": "dapo"}.get(name, "stapo")
    assert objective.name == (name.partition("-")[0] if name in PAPERS else small)
    assert f"# Paper: arXiv {objective.paper}" in "\n".join(comment(name))


@pytest.mark.parametrize("name", PAPERS)
def test_what_the_paper_does_not_give_is_listed(name: str) -> None:
    assert any(line.startswith("# Not given in the paper") for line in comment(name))
    assert any("DAPO-Math-17k" in line for line in comment(name))


@pytest.mark.parametrize(("name", "settings"), SUGGESTED, ids=lambda value: value if isinstance(value, str) else None)
def test_every_setting_in_a_comment_works(name: str, settings: tuple[str, ...]) -> None:
    config = load(name, settings)
    assert config != load(name)
    assert config.build_objective().explain()


def test_settings_are_found_in_the_comments() -> None:
    assert len(SUGGESTED) > 100
    assert all(settings for _, settings in SUGGESTED)
    assert ("addition", ("objective.name=sspo + s2t",)) in SUGGESTED
    assert ("smollm2", ("model.precision=fp32",)) in SUGGESTED


def test_the_settings_on_the_page_of_recipes_work() -> None:
    lines = [line for line in recipes_page().splitlines() if line.startswith("trimtab train") and "--set" in line]
    assert len(lines) == 2
    for line in lines:
        assert load(line.split()[2], settings_in(line)) != load(line.split()[2])


def test_smollm2_zero_is_smollm2_with_easy_stories_and_no_warm_start() -> None:
    changes = ["task.digits=1", "task.terms=2", "update.lr=3e-5", "run.steps=90", "run.eval_every=5"]
    zero, warm = load("smollm2-zero"), load("smollm2", changes)
    assert zero.warm_start.steps == 0
    assert zero == warm.model_copy(update={"warm_start": zero.warm_start})


@pytest.mark.parametrize("name", STAPO)
def test_stapos_batch_is_the_papers(name: str) -> None:
    config = load(name)
    rollout, update = config.rollout, config.update
    assert (rollout.prompts, rollout.samples, update.per_step) == (256, 8, 4)
    assert minibatch(config) == 64 * 8 == 512
    assert (rollout.max_prompt_tokens, rollout.max_new_tokens) == (1024, 15 * 1024)
    assert (rollout.temperature, rollout.top_p, rollout.top_k, rollout.dynamic_sampling) == (1.0, 1.0, 0, False)
    assert (update.lr, update.warmup_steps, update.max_grad_norm) == (1e-6, 10, 1.0)


@pytest.mark.parametrize("name", STAPO)
def test_stapos_objective_reward_and_prompt_are_the_papers(name: str) -> None:
    config = load(name)
    explanation = config.build_objective().explain()
    for number in ("clip(r, 0.8, 1.28)", "at most -A 10", "p < 0.002", "the 0.75 quantile", "rare rewarded tokens"):
        assert number in explanation
    assert "token-mean" in explanation
    assert not config.build_objective().penalties
    assert config.build_objective().token_stats == "current"
    assert (config.reward.correct, config.reward.wrong, config.reward.overlong_buffer) == (1.0, -1.0, 0)
    assert config.task.suffix.strip() == r"Please reason step by step, and put your final answer within \boxed{}"
    assert config.task.rule == "strict-box"  # JustRL's, on which it builds
    size = name.removeprefix("stapo-qwen3-").upper()
    assert config.model.path == f"Qwen/Qwen3-{size}-Base"


@pytest.mark.parametrize("name", STARE)
def test_stares_batch_is_the_papers(name: str) -> None:
    config = load(name)
    rollout, update, reward = config.rollout, config.update, config.reward
    assert (rollout.prompts, rollout.samples, update.per_step) == (64, 8, 1)
    assert minibatch(config) == 512
    assert rollout.max_prompt_tokens + rollout.max_new_tokens == (4 if "short" in name else 16) * 1024
    assert (rollout.dynamic_sampling, rollout.dynamic_oversample, rollout.dynamic_max_rounds) == (True, 3.0, 10)
    assert (rollout.temperature, rollout.top_p, rollout.top_k) == (1.0, 1.0, 0)
    assert (update.lr, update.warmup_steps, update.max_grad_norm) == (1e-6, 0, 1.0)
    assert (reward.correct, reward.wrong) == (1.0, 0.0)


@pytest.mark.parametrize("name", STARE)
def test_stares_objective_is_the_papers_and_milder_from_14b_on(name: str) -> None:
    config = load(name)
    big = name.endswith(("14b", "32b"))
    explanation = config.build_objective().explain()
    for number in ("clip(r, 0.8, 1.28)", "at most -A 10", "L+ times", "below 0.3", "the top 10% by surprisal"):
        assert number in explanation
    assert f"L+ times {1.05 if big else 1.1} " in explanation
    damped = load(name, ["objective.variant=C2"]).build_objective().explain()
    assert str(0.95 if big else 0.9) in damped
    assert not config.build_objective().penalties


def test_stares_models_are_the_papers() -> None:
    assert load("stare-short-7b").model.path == "Qwen/Qwen2.5-Math-7B"
    assert load("stare-long-1.5b").model.path == "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
    assert load("stare-long-8b").model.path == "Qwen/Qwen3-8B-Base"


@pytest.mark.parametrize("name", SSPO)
def test_sspo_is_our_reading_off_policy(name: str) -> None:
    config = load(name)
    explanation = config.build_objective().explain()
    for number in ("over the token's subsentence", "clip(r, 0.98, 1.028)", "0.5, 1.5", "seq-mean-token-mean"):
        assert number in explanation
    assert config.update.per_step > 1, "on-policy every ratio is 1"
    assert minibatch(config) == 512
    assert config.rollout.max_prompt_tokens + config.rollout.max_new_tokens == 4096
    assert config.model.path == f"Qwen/Qwen2.5-Math-{name.removeprefix('sspo-qwen2.5-math-').upper()}"


@pytest.mark.parametrize("name", PAPERS)
def test_a_micro_batch_holds_the_longest_response_and_an_evaluation_has_its_data(name: str) -> None:
    config = load(name)
    assert config.model.precision == "bf16" and config.model.gradient_checkpointing
    assert config.rollout.batch_size % config.rollout.samples == 0
    assert config.update.token_budget >= config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    assert config.task.path == "BytedTsinghua-SIA/DAPO-Math-17k"
    assert config.run.eval_every == 0 or config.task.eval_path is not None


@pytest.mark.parametrize("name", ["demo", "addition"])
def test_a_tiny_recipe_trains(tmp_path: Path, name: str) -> None:
    quick = ["run.steps=2", "warm_start.steps=3", "run.threads=1", "run.eval_problems=20", "run.device=cpu"]
    run = Run(load(name, quick), RunFolder(tmp_path / "run"), PlainReporter(lambda text: None))
    train(run)
    assert run.stopped is StopReason.FINISHED
    records = run.folder.records()
    assert [record["step"] for record in records] == [0, 1, 2]
    assert all(record["update/skipped"] == 0 and record["tokens/count"] >= 256 for record in records[1:])
    assert load(tmp_path / "run/config.toml") == load(name, quick)
