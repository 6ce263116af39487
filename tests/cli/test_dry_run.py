"""The dry run prints a recipe with its objective, batch sizes and memory."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from trimtab.cli.dry_run import describe_dry_run, minibatches
from trimtab.trainer.config import PACKAGED, Config, find_recipe, load
from trimtab.trainer.model import demo_model, demo_tokenizer
from trimtab.trainer.train.rollouts import split_into_minibatches


def recipe(*settings: str) -> Config:
    return load(None, settings)


def test_the_whole_output_is_the_recipe_again() -> None:
    config = recipe("update.lr=3e-4", "objective=sspo + s2t", "rollout.prompts=5")
    assert Config.model_validate(tomllib.loads(describe_dry_run(config))) == config


def test_the_objective_is_explained_with_its_numbers() -> None:
    assert "p < 0.005" in describe_dry_run(recipe("objective.name=stapo", "objective.tau_p=0.005"))


def test_batch_sizes_and_counts_are_printed() -> None:
    text = describe_dry_run(
        recipe("rollout.prompts=16", "rollout.samples=8", "update.per_step=4", "run.steps=100", "task.size=400")
    )
    for words in (
        "16 prompts x 8 samples = 128 responses",
        "4 mini-batches of 32 responses",
        "4 updates per step",
        "100 steps x 4 updates = 400 updates",
        "100 steps x 128 responses = 12,800 responses",
        "1,600 prompts of a task with 400 problems = 4.00 epochs",
    ):
        assert words in text


def test_the_token_budget_says_how_many_of_the_longest_responses_fit() -> None:
    settings = ("rollout.max_prompt_tokens=100", "rollout.max_new_tokens=28", "rollout.prompts=2", "rollout.samples=8")
    text = describe_dry_run(recipe(*settings, "update.token_budget=400"))
    assert "100 + 28 = 128 tokens" in text
    assert "at most 3 responses of that length in one forward pass" in text
    assert "16 responses of an update take at most 6 passes" in text
    assert "is less than one response of that length" in describe_dry_run(recipe(*settings, "update.token_budget=127"))


def test_one_update_per_step_is_explained_to_be_on_policy() -> None:
    assert "nothing is clipped" in describe_dry_run(recipe("update.per_step=1"))
    assert "nothing is clipped" not in describe_dry_run(recipe("update.per_step=2"))


def test_passes_multiply_the_updates() -> None:
    text = describe_dry_run(recipe("rollout.prompts=16", "update.per_step=4", "update.passes=3", "run.steps=100"))
    assert "one update each in each of 3 passes: 12 updates per step (update.per_step, update.passes)" in text
    assert "100 steps x 12 updates = 1,200 updates" in text
    assert "nothing is clipped" not in describe_dry_run(recipe("update.per_step=1", "update.passes=2"))


@pytest.mark.parametrize(("prompts", "updates"), [(8, 1), (8, 2), (7, 2), (9, 4), (4, 8)])
def test_mini_batches_are_those_the_trainer_makes(prompts: int, updates: int) -> None:
    class Length:
        def __len__(self) -> int:
            return 1

    config = Config.model_construct(
        rollout=recipe(f"rollout.prompts={prompts}", "rollout.samples=4").rollout,
        update=recipe().update.model_copy(update={"per_step": updates}),
    )
    groups = [[Length()] * 4 for _ in range(prompts)]
    assert minibatches(config) == split_into_minibatches(groups, updates)[1]  # type: ignore[arg-type]


def test_with_dynamic_sampling_the_counts_are_lower_bounds() -> None:
    text = describe_dry_run(recipe("rollout.dynamic_sampling=true", "run.steps=10", "rollout.prompts=4"))
    assert "at least 40 prompts" in text


def test_a_data_set_that_is_not_here_is_not_downloaded_to_count_it() -> None:
    assert "once the data set is loaded" in describe_dry_run(recipe("task.name=gsm8k"))


def test_a_missing_file_is_found_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.jsonl"):
        describe_dry_run(recipe("task.name=file", f"task.path={tmp_path / 'nowhere.jsonl'}"))


def test_the_demo_has_a_dry_run() -> None:
    assert "dapo + trim" in describe_dry_run(load(find_recipe("demo")))
    assert PACKAGED.is_dir()


def test_several_rewards_are_written_as_a_sum() -> None:
    terms = ["reward.terms.short.rule=length", "reward.terms.short.options={free=2,limit=4}"]
    text = describe_dry_run(load("addition", [*terms, "reward.terms.short.weight=-0.5"]))
    assert "the reward of a response: 1 x task + -0.5 x short (reward.weight, reward.terms)" in text


# --- the prompts


def mine(folder: Path, *prompts: str, **more: str) -> Config:
    rows = [json.dumps({"prompt": prompt, "reward_model": {"ground_truth": "2"}}) for prompt in prompts]
    (folder / "mine.jsonl").write_text("".join(f"{row}\n" for row in rows))
    settings = [f"{key.replace('__', '.')}={value}" for key, value in more.items()]
    return recipe("task.name=file", f"task.path={folder / 'mine.jsonl'}", *settings)


def test_lengths_of_prompts_are_a_histogram_and_long_ones_are_counted(tmp_path: Path) -> None:
    config = mine(tmp_path, "1+1=", *["12+12="] * 3, "1+" * 20, rollout__max_prompt_tokens="20")
    text = describe_dry_run(config)
    assert "5 prompts: 4 to 6 tokens, 5.5 on average" in text
    assert f"    6 to 6  {'*' * 40} 3\n" in text
    assert "1 of 5 prompts have more than 20 tokens" in text
    assert "a run stops at the first of them" in text
    config = mine(tmp_path, "1+" * 20, rollout__max_prompt_tokens="20", task__long_prompts="drop")
    assert "they are left out (task.long_prompts)" in describe_dry_run(config)


def test_a_prompt_is_shown_as_the_model_reads_it(tmp_path: Path) -> None:
    tokenizer = demo_tokenizer("demo-tools")
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}{% endfor %}="
    demo_model(0, "demo-tools").save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    text = describe_dry_run(mine(tmp_path, "1+1", model__path=str(tmp_path / "model")))
    assert "#   the first one as the model reads it:\n#     | <user>\n#     | 1+1=\n" in text


def test_weights_of_files_and_repeated_problems_are_shown(tmp_path: Path) -> None:
    config = mine(tmp_path, "1+1=", "1+2=", "1+1=")
    (tmp_path / "more.jsonl").write_text((tmp_path / "mine.jsonl").read_text().replace("1+", "3+"))
    paths = f'{{"{tmp_path}/mine.jsonl" = 2, "{tmp_path}/more.jsonl" = 1}}'
    config = mine(tmp_path, "1+1=", "1+2=", "1+1=", task__path=paths)
    text = describe_dry_run(config)
    assert "4 prompts of an epoch are of a file with 3 problems (weight 2 in task.path)" in text
    assert "2 training problems repeat the prompt of an earlier one" in text


def test_a_tokenizer_that_is_not_here_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    text = describe_dry_run(mine(tmp_path, "1+1=", model__path="nobody/nothing"))
    assert "the tokenizer of nobody/nothing is not on this machine yet" in text


def test_the_longest_response_is_the_sum_of_its_parts_with_tools_too() -> None:
    assert "  prompt + response are at most 32 + 8 = 40 tokens" in describe_dry_run(load("demo"))
    tools = describe_dry_run(load("smollm2-tools"))
    (line,) = (line for line in tools.splitlines() if " are at most " in line and "prompt +" in line)
    assert "prompt + response + replies of tools are at most" in line and "rollout.max_observation_tokens)" in line
    parts, _, total = line.partition("at most ")[2].partition(" tokens")[0].partition(" = ")
    assert sum(int(part.replace(",", "")) for part in parts.split(" + ")) == int(total.replace(",", ""))
