"""Recipes with errors: every message names the key, the value and what is allowed."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from recipe_docs import recipe_title, recipes_page
from trimtab.objectives.methods.registry import METHODS
from trimtab.own_parts import register
from trimtab.trainer.config import Config, json_schema, load, packaged_recipes, parse
from trimtab.trainer.train.run_folder import resolved_toml

ROOT = Path(__file__).parent.parent.parent


def error_of(table: dict[str, Any]) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        parse(table)
    return str(caught.value)


def error_of_settings(*settings: str) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        load("addition", settings)
    return str(caught.value)


def test_an_empty_recipe_is_all_defaults() -> None:
    assert parse({}) == Config()
    assert load(None) == Config()


# Keys


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"run": {"stesp": 3}}, "unknown key run.stesp: did you mean steps?"),
        ({"update": {"learning_rate": 3}}, "unknown key update.learning_rate: did you mean lr?"),
        ({"rollout": {"max_new_token": 3}}, "unknown key rollout.max_new_token: did you mean max_new_tokens"),
        ({"tsak": {}}, "unknown section tsak: did you mean task?"),
        ({"lr": 3}, "unknown section lr: it is a key of [warm_start] and [update]"),
        ({"xyz": 3}, "unknown section xyz: there are objective, task, model,"),
        ({"task": 3}, "task = 3: task is a section, a table with the keys name, environment, family,"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest(table: dict[str, Any], text: str) -> None:
    assert text in error_of(table)


# Values


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"run": {"steps": "many"}}, "run.steps = 'many': must be a whole number"),
        ({"run": {"steps": 1.5}}, "run.steps = 1.5: must be a whole number"),
        ({"run": {"steps": True}}, "run.steps = True: must be a whole number"),
        ({"update": {"lr": "small"}}, "update.lr = 'small': must be a number"),
        ({"update": {"lr": float("nan")}}, "update.lr = nan: must be a finite number"),
        ({"update": {"lr": float("inf")}}, "update.lr = inf: must be a finite number"),
        ({"model": {"chat": "yes"}}, "model.chat = 'yes': must be true or false"),
        ({"task": {"name": "file", "path": 3}}, "task.path = 3: must be text, in quotes"),
        ({"task": {"name": "gym:x", "options": 3}}, "task.options = 3: must be a table"),
        ({"run": {"loggers": "wandb"}}, "run.loggers = 'wandb': must be a list, for example ['wandb']"),
        ({"tools": {"use": "calculator"}}, "tools.use = 'calculator': must be a list, for example ['calculator']"),
        ({"tools": {"use": 3}}, "tools.use = 3: must be a list, in brackets"),
        ({"run": {"loggers": ["wanb"]}}, "run.loggers[0] = 'wanb': must be one of 'wandb', 'trackio' or 'tensorboard'"),
        ({"update": {"betas": [0.9]}}, "update.betas = [0.9]: must be two numbers"),
        ({"update": {"betas": [0.9, 0.9, 0.9]}}, "update.betas = [0.9, 0.9, 0.9]: must be two numbers"),
        ({"update": {"betas": 3}}, "update.betas = 3: must be two numbers"),
        ({"objective": 3}, "objective = 3: must be a table"),
    ],
)
def test_a_value_of_the_wrong_type_is_an_error_that_names_the_right_type(table: dict[str, Any], text: str) -> None:
    assert text in error_of(table)


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"run": {"steps": 0}}, "run.steps = 0: must be at least 1"),
        ({"update": {"lr": 0}}, "update.lr = 0: must be more than 0"),
        ({"rollout": {"top_p": 1.5}}, "rollout.top_p = 1.5: must be at most 1"),
        ({"update": {"betas": [0.9, 1.0]}}, "update.betas[1] = 1.0: must be less than 1"),
        ({"task": {"digits": 10}}, "task.digits = 10: must be at most 9"),
        ({"task": {"family": "aditions"}}, "did you mean 'addition'?"),
        ({"model": {"precision": "fp8"}}, "model.precision = 'fp8': must be one of 'fp32', 'bf16' or 'fp16'"),
        ({"task": {"name": "arithmetics"}}, "task.name: unknown task 'arithmetics': did you mean arithmetic?"),
        ({"task": {"name": "gym:"}}, "task.name: unknown task 'gym:'"),
        ({"task": {"name": "file", "rule": "box"}}, "task.rule: unknown rule 'box': did you mean boxed?"),
    ],
)
def test_a_value_out_of_range_is_an_error_that_names_the_range(table: dict[str, Any], text: str) -> None:
    assert text in error_of(table)


def test_every_error_has_its_own_line() -> None:
    lines = error_of({"run": {"stesp": 3, "steps": 0}, "update": {"lr": -1}}).splitlines()
    assert len(lines) == 3


def test_whole_numbers_are_numbers_and_reasoning_gym_has_many_tasks() -> None:
    assert parse({"update": {"lr": 1}}).update.lr == 1.0
    assert parse({"task": {"name": "gym:countdown"}}).task.name == "gym:countdown"


# Across sections


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"update": {"per_step": 3}}, "update.per_step = 3 does not divide rollout.prompts = 32: the 256 responses"),
        ({"update": {"per_step": 64}}, "update.per_step = 64 does not divide rollout.prompts = 32"),
        ({"objective": {"name": "grpo + kl"}}, "objective.name = 'grpo + kl' has a KL to a reference model: set model"),
        ({"objective": {"name": "grpo", "kl": 0.01}}, "set model.reference ('start' or a path)"),
        (
            {"rollout": {"dynamic_sampling": True, "samples": 1}},
            "rollout.dynamic_sampling needs rollout.samples of 2 or more, not 1",
        ),
        (
            {"rollout": {"samples": 1}, "objective": {"name": "dr_grpo"}},
            "its advantage (group_centered) compares the responses to one prompt",
        ),
        ({"objective": {"name": "stapo", "token_stats": "current"}}, "set update.token_stats alone"),
        ({"reward": {"wrong": 1.0}}, "reward.correct = 1.0 must be more than reward.wrong = 1.0"),
        ({"reward": {"overlong_buffer": 9}}, "reward.overlong_buffer = 9 must be at most rollout.max_new_tokens = 8"),
    ],
)
def test_sections_that_contradict_each_other_are_an_error(table: dict[str, Any], text: str) -> None:
    assert text in error_of(table)


def test_an_advantage_of_ones_own_may_need_no_group() -> None:
    def reward_itself(reward: Any, group: Any) -> Any:
        return reward

    register(reward_itself)
    config = parse({"rollout": {"samples": 1}, "objective": {"name": "grpo", "advantage": "python:reward_itself"}})
    assert config.rollout.samples == 1


def test_a_kl_penalty_with_a_reference_is_valid() -> None:
    config = parse({"objective": {"name": "grpo + kl"}, "model": {"reference": "start"}})
    assert "ref_logp" in config.build_objective().needs


# Objectives


def test_an_objectives_options_reach_it() -> None:
    config = parse({"objective": {"name": "stapo", "tau_p": 0.01, "clip_high": 0.3}})
    assert "p < 0.01" in config.build_objective().explain()
    assert "clip(r, 0.8, 1.3)" in config.build_objective().explain()


def test_an_attachment_can_be_a_key() -> None:
    config = parse({"objective": {"name": "sspo", "stare": {"variant": "C2"}, "tis": 3.0}})
    assert config.build_objective().name == "sspo + stare + tis"


def test_an_objective_can_be_just_a_name() -> None:
    assert parse({"objective": "grpo"}).objective == {"name": "grpo"}


@pytest.mark.parametrize("none", ["none", None])
def test_none_is_a_value_of_an_option_and_is_kept_in_the_runs_folder(none: str | None) -> None:
    config = parse({"objective": {"name": "dapo", "dual_clip": none}})
    again = parse(tomllib.loads(resolved_toml(config)))
    assert again == config
    assert "10" not in again.build_objective().surrogate.formula
    assert "10" in parse({"objective": "dapo"}).build_objective().surrogate.formula


def test_options_without_a_name_are_those_of_the_default_objective() -> None:
    assert parse({"objective": {"tau_p": 0.1}}).objective == {"name": "stapo", "tau_p": 0.1}


def test_token_stats_are_passed_to_the_objective() -> None:
    assert parse({"update": {"token_stats": "current"}}).build_objective().token_stats == "current"
    assert parse({}).build_objective().token_stats is None


@pytest.mark.parametrize(
    ("objective", "text"),
    [
        ({"name": "grop"}, "objective: unknown method 'grop': did you mean grpo"),
        ({"name": "stapo", "tau": 1}, "objective: unknown option of stapo 'tau': did you mean tau_p"),
        ({"name": "stapo", "tau_p": 2}, "objective: stapo: option tau_p=2 must be between 0 and 1"),
        ({"name": "stare", "variant": "O9"}, "option variant='O9' must be one of O1, O2"),
        ({"name": "sspo + s2t + s2t"}, "attach it once"),
        ({"name": "sspo +"}, "cannot read the objective 'sspo +'"),
        ({"name": "s2t"}, "write for example 'dapo + s2t'"),
        ({"nmae": "grpo"}, "objective: unknown option of stapo 'nmae'"),
    ],
)
def test_an_error_of_the_objective_is_shown_to_the_user(objective: dict[str, Any], text: str) -> None:
    message = error_of({"objective": objective})
    assert text in message
    assert "pydantic" not in message and "Value error" not in message


# Files


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown recipe 'dmeo': did you mean demo\? \(a file of your own ends in"):
        load("dmeo")
    with pytest.raises(
        ValueError, match=r"unknown recipe 'zzz': there are addition, agent, countdown, countdown-steps, demo,"
    ):
        load("zzz")


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"mine\.toml': there is no such file"):
        load(tmp_path / "mine.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ValueError, match=r"folder\.toml': there is no such file"):
        load(str(tmp_path / "folder.toml"))


@pytest.mark.parametrize("content", [b"[run\nsteps = 3", b"run.steps = ", b"\xff\xfe", b"[run]\n[run]\n"])
def test_invalid_toml_is_an_error_that_names_file_and_position(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "mine.toml").write_bytes(content)
    with pytest.raises(ValueError, match=r"mine\.toml is not TOML: .*(line|position|at end)"):
        load(tmp_path / "mine.toml")


def test_a_recipe_can_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("# Mine.\n[run]\nsteps = 7\n")
    assert load(path).run.steps == load(str(path)).run.steps == 7
    assert recipe_title(path) == "Mine."


# Settings


@pytest.mark.parametrize(
    ("setting", "section", "key", "value"),
    [
        ("run.steps=7", "run", "steps", 7),
        (" run . steps = 7 ", "run", "steps", 7),
        ("update.lr=1e-6", "update", "lr", 1e-6),
        ("update.lr=1", "update", "lr", 1.0),
        ("rollout.dynamic_sampling=true", "rollout", "dynamic_sampling", True),
        ("update.betas=[0.9, 0.95]", "update", "betas", (0.9, 0.95)),
        ("run.loggers=['wandb', \"trackio\"]", "run", "loggers", ["wandb", "trackio"]),
        ("rollout.vllm_options={seed_x = 2}", "rollout", "vllm_options", {"seed_x": 2}),
        ("rollout.vllm_options.seed_x=2", "rollout", "vllm_options", {"seed_x": 2}),
        ("task.family=subtraction", "task", "family", "subtraction"),
        ("model.path=data/a=b", "model", "path", "data/a=b"),
        ("model.attention=", "model", "attention", ""),
        ('model.attention="\\nThink."', "model", "attention", "\nThink."),
        ("model.attention=two words", "model", "attention", "two words"),
        ("run.device=cuda:1", "run", "device", "cuda:1"),
        ("model.reference=start", "model", "reference", "start"),
        ("model.reference=none", "model", "reference", None),
        ("warm_start.max_problems=none", "warm_start", "max_problems", None),
        ("model.path=Qwen/Qwen3-1.7B-Base", "model", "path", "Qwen/Qwen3-1.7B-Base"),
    ],
)
def test_settings_are_toml_values_or_strings(setting: str, section: str, key: str, value: object) -> None:
    assert getattr(getattr(load("addition", [setting]), section), key) == value


@pytest.mark.parametrize("setting", ["run.steps", "=3", "run.=3", ".steps=3", "", "run..steps=3"])
def test_an_invalid_setting_is_an_error_with_an_example(setting: str) -> None:
    assert "write section.key=value, for example update.lr=1e-6" in error_of_settings(setting)


def test_settings_are_checked_like_recipes() -> None:
    assert "unknown key run.stesp: did you mean steps?" in error_of_settings("run.stesp=3")
    assert "unknown section runn: did you mean run?" in error_of_settings("runn.steps=3")
    assert "run.steps = 'seven': must be a whole number" in error_of_settings("run.steps=seven")
    assert "run.steps = '1\\nseed = 3'" in error_of_settings("run.steps=1\nseed = 3")
    assert "'steps' is a value, not a section" in error_of_settings("run.steps.x=3")
    assert "task = 3: task is a section" in error_of_settings("task=3")


def test_the_last_setting_of_a_key_wins() -> None:
    assert load("addition", ["run.steps=3", "run.steps=4"]).run.steps == 4
    assert load("addition", ["objective=grpo", "objective.name=dapo"]).objective["name"] == "dapo"


@pytest.mark.parametrize("name", ["grpo", "sspo + s2t", "gspo + stare(variant=C2)", "sspo+s2t(tau_p=0.001)+stare"])
def test_objectives_are_set_by_name(name: str) -> None:
    whole, key = load("addition", [f"objective={name}"]), load("addition", [f"objective.name={name}"])
    quoted = load("addition", [f'objective.name="{name}"'])
    assert whole.objective == key.objective == quoted.objective == {"name": name}


def test_another_method_drops_the_recipes_options_and_the_same_one_keeps_them() -> None:
    assert load("addition").objective["tau_p"] == 0.2
    assert load("addition", ["objective.name=grpo"]).objective == {"name": "grpo"}
    assert load("addition", ["objective.name=stapo + stare"]).objective["tau_p"] == 0.2
    assert load("addition", ["objective=stapo"]).objective == {"name": "stapo"}
    assert load("stare-short-14b", ["objective.name=stare + s2t"]).objective["boost"] == 1.05


def test_options_may_come_before_or_after_the_name() -> None:
    settings = ["objective.variant=C2", "objective.name=stare"]
    assert load("addition", settings) == load("addition", settings[::-1])
    assert load("addition", settings).objective == {"name": "stare", "variant": "C2"}
    assert "unknown option of grpo 'tau_p'" in error_of_settings("objective.tau_p=0.1", "objective.name=grpo")


def test_an_objective_can_be_set_as_a_table() -> None:
    assert load("addition", ['objective={name = "stare", variant = "C2"}']).objective["variant"] == "C2"


# The resolved recipe, the schema, the page


@pytest.mark.parametrize(
    "settings", [[], ["objective.name=dapo", "objective.dual_clip=none", "update.betas=[0.8,0.9]"]]
)
@pytest.mark.parametrize("recipe", list(packaged_recipes()))
def test_a_resolved_recipe_is_the_same_recipe(recipe: str, settings: list[str], tmp_path: Path) -> None:
    config = load(recipe, settings)
    (tmp_path / "config.toml").write_text(resolved_toml(config), encoding="utf-8")
    assert load(tmp_path / "config.toml") == config


def schema_errors(value: Any, rule: Any, root: dict[str, Any]) -> list[str]:
    """As much of JSON Schema as recipes use."""
    if rule is True:
        return []
    if "$ref" in rule:
        return schema_errors(value, root["$defs"][rule["$ref"].rpartition("/")[2]], root)
    if "anyOf" in rule:
        found = [schema_errors(value, choice, root) for choice in rule["anyOf"]]
        return [] if [] in found else found[0]
    if "if" in rule:
        branch = "else" if schema_errors(value, rule["if"], root) else "then"
        rest = {key: each for key, each in rule.items() if key not in ("if", "then", "else")}
        return schema_errors(value, rest, root) + schema_errors(value, rule.get(branch, True), root)
    kinds = {"object": dict, "string": str, "boolean": bool, "array": list, "null": type(None)}
    kind = rule.get("type")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = {"integer": number and isinstance(value, int), "number": number, None: True}
    if not (fits[kind] if kind in fits else isinstance(value, kinds[kind])):
        return [f"{value!r} is no {kind}"]
    found = [f"{value!r} is none of {rule['enum']}" for _ in [0] if value not in rule.get("enum", [value])]
    if "const" in rule and value != rule["const"]:
        found.append(f"{value!r} is not {rule['const']}")
    if "pattern" in rule and not re.search(rule["pattern"], value):
        found.append(f"{value!r} does not match {rule['pattern']}")
    if number and not (value >= rule.get("minimum", value) and value <= rule.get("maximum", value)):
        found.append(f"{value!r} is out of range")
    if number and not (
        value > rule.get("exclusiveMinimum", value - 1) and value < rule.get("exclusiveMaximum", value + 1)
    ):
        found.append(f"{value!r} is out of range")
    if isinstance(value, list):
        rules = rule.get("prefixItems", [rule.get("items", {})] * len(value))
        found += [error for item, inner in zip(value, rules, strict=True) for error in schema_errors(item, inner, root)]
    if isinstance(value, dict):
        known = rule.get("properties", {})
        found += [f"{key} is missing" for key in rule.get("required", []) if key not in value]
        found += [
            f"{key} is unknown" for key in value if key not in known and rule.get("additionalProperties") is False
        ]
        found += [error for key in value if key in known for error in schema_errors(value[key], known[key], root)]
    return found


@pytest.mark.parametrize("path", packaged_recipes().values(), ids=packaged_recipes())
def test_the_schema_accepts_every_recipe_as_written_and_as_resolved(path: Path) -> None:
    rules = json_schema()
    assert schema_errors(tomllib.loads(path.read_text()), rules, rules) == []
    assert schema_errors(tomllib.loads(resolved_toml(load(path))), rules, rules) == []


@pytest.mark.parametrize(
    ("table", "error"),
    [
        ({"run": {"stesp": 3}}, "stesp is unknown"),
        ({"runn": {}}, "runn is unknown"),
        ({"objective": {"name": "stapo", "tau_pp": 3}}, "tau_pp is unknown"),
        ({"objective": {"tau_p": 3}}, "name is missing"),
        ({"run": {"steps": 0}}, "0 is out of range"),
        ({"update": {"lr": 0}}, "0 is out of range"),
        ({"run": {"steps": "many"}}, "'many' is no integer"),
        ({"task": {"family": "sums"}}, "'sums' is none of"),
    ],
)
def test_the_schema_rejects_what_the_models_reject(table: dict[str, Any], error: str) -> None:
    rules = json_schema()
    assert any(error in found for found in schema_errors(table, rules, rules))
    assert error_of(table)


def test_the_schema_knows_every_option_of_every_method() -> None:
    known = json_schema()["properties"]["objective"]["properties"]
    for entry in METHODS.values():
        assert entry.options.keys() <= known.keys()


def test_every_key_has_a_description() -> None:
    for field in Config.model_fields.values():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            assert section.__doc__
            for key, inner in section.model_fields.items():
                assert inner.description, key


def test_the_page_of_recipes_is_up_to_date() -> None:
    assert (ROOT / "docs/recipes.md").read_text(encoding="utf-8") == recipes_page(), "run `make docs`"


def test_the_page_has_every_recipe_and_key_with_its_default() -> None:
    page = recipes_page()
    for name, path in packaged_recipes().items():
        assert f"| `{name}` | {recipe_title(path)} |" in page
    for row in (
        "| `digits` | whole number ≥ 1, ≤ 9 | `2` |",
        "| `lr` | number > 0 | `0.001` | AdamW's",
        "| `reference` | text | none |",
        "| `betas` | [number ≥ 0, < 1, number ≥ 0, < 1] | `[0.9, 0.999]` |",
        "| `loggers` | list of `wandb`, `trackio`, `tensorboard` | empty |",
        "| `chat` | true, false | true |",
    ):
        assert row in page


# --- agents


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"agent": {"run": "solve"}}, "agent.run: 'solve': an agent is a function of your own, python:MODULE:NAME"),
        ({"agent": {"run": "python:solve"}}, "an agent runs in a process of its own, which knows files only"),
        ({"agent": {"run": "python:no_such_module:solve"}}, "there is no module no_such_module"),
        ({"agent": {"run": "python:json:loads", "command": ["a"]}}, "set one of them"),
        ({"agent": {"timeout": 3.0}}, r"\[agent\] names no agent"),
        ({"agent": {"command": ["a"]}, "tools": {"use": ["calculator"]}}, "an agent calls its tools itself"),
        ({"agent": {"command": ["a"]}, "rollout": {"max_turns": 2}}, "an agent decides itself how often it asks"),
        ({"agent": {"command": ["a"]}, "update": {"old_stats": "sampled"}}, "does not work with an agent"),
        ({"agent": {"command": [""]}}, "names no program"),
        ({"agent": {"command": ["a"], "concurrency": 0}}, "agent.concurrency"),
    ],
)
def test_an_agent_that_cannot_be_is_refused_in_words(table: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(table)


def test_a_recipe_with_an_agent_imports_neither_its_module_nor_the_packages_that_run_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit('it is imported')")
    recipe = tmp_path / "own.toml"
    recipe.write_text('[agent]\nrun = "python:own:solve"\n')
    code = (
        "import sys; from trimtab.trainer.config import load; assert load(sys.argv[1]).has_agent; "
        "print([m for m in ('torch', 'transformers', 'starlette', 'uvicorn', 'openai', 'own') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code, str(recipe)], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
    assert load(recipe).agent_function == "python:own:solve"


def test_a_task_of_verifiers_brings_its_agent() -> None:
    table = {"task": {"name": "verifiers:some-env"}}
    config = parse(table)
    assert config.has_agent and str(config.agent_function).startswith("python:trimtab.data.verifiers_env:agent_")
    with pytest.raises(ValueError, match="brings its own agent: leave out agent"):
        parse(table | {"agent": {"run": "python:json:loads"}})
