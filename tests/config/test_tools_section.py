"""The keys of a recipe that are about tools: what is refused and in which words, what a stored run keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimtab.trainer.config import Config, load, load_stored, parse_stored
from trimtab.trainer.memory.estimate import estimate_memory
from trimtab.trainer.train import resolved_toml

TOOLS = "python:helpers.train.bad_tools"
TURNS = "rollout.max_turns=3"
BAD = "python:helpers.agents.misbehaving_tools"
CALCULATOR = "tools.use=['calculator']"


def test_without_tools_responses_have_one_turn() -> None:
    config = load("addition")
    assert (config.has_tools, config.rollout.max_turns, config.rollout.max_observed_tokens) == (False, 1, 0)


@pytest.mark.parametrize("named", [CALCULATOR, f"tools.use=['{TOOLS}:hang']", f"task.environment={TOOLS}:Game"])
def test_tools_are_named_in_a_recipe(named: str) -> None:
    config = load("addition", [named, TURNS, "tools.timeout=2.5"])
    assert config.has_tools
    limits = config.conversation_limits
    assert (limits.max_turns, limits.timeout, limits.max_observation_tokens) == (3, 2.5, 512)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([CALCULATOR], r"tools.use = \['calculator'\], but rollout.max_turns = 1: .* set it to 2 or more"),
        ([f"task.environment={TOOLS}:Game"], r"Game', but rollout.max_turns = 1"),
        ([TURNS], r"rollout.max_turns = 3, but there is nothing to call: set tools.use or task.environment"),
        (
            ["tools.use=['calculater']", TURNS],
            r"tools.use: there is no tool 'calculater': did you mean calculator\?",
        ),
        (["tools.use=['calculator', 'calculator']", TURNS], r"names a tool twice"),
        ([f"tools.use=['{TOOLS}:Game']", TURNS], r"is a class: name it as the environment \(task.environment\)"),
        ([f"tools.use=['{TOOLS}:none']", TURNS], r"bad_tools"),
        ([f"tools.use=['{BAD}:undocumented']", TURNS], r"tools.use: .*undocumented \(.*:\d+\): add a docstring"),
        ([f"tools.use=['{BAD}:untyped']", TURNS], r"tools.use: .*add a type to the parameter text, as text: str"),
        ([f"task.environment={BAD}:WithoutReset", TURNS], r"task.environment: .*add a method reset\(self, prob"),
        (["task.environment=Game", TURNS], r"task.environment: environment 'Game': name a class of your own, python:"),
        ([f"task.environment={TOOLS}:hang", TURNS], r"an environment is a class; a function belongs in tools.use"),
        (["tools.format=xml"], r"tools.format = 'xml': must be one of 'auto', 'hermes', 'llama', 'fenced' or 'plain'"),
        (["tools.sandbox_level=ful"], r"tools.sandbox_level: 'ful': did you mean full\?"),
        (["reward.void_turns=exclude"], r"reward.void_turns = 'exclude' is about conversations with tools"),
        (["rollout.max_observation_tokens=3"], r"rollout.max_observation_tokens = 3: must be at least 16"),
    ],
)
def test_what_does_not_fit_is_an_error_in_words(settings: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load("addition", settings)


@pytest.mark.parametrize("named", [CALCULATOR, f"task.environment={TOOLS}:Game"])
def test_a_run_is_read_back_as_it_was(tmp_path: Path, named: str) -> None:
    config = load("addition", [named, TURNS, "reward.void_turns=exclude"])
    (tmp_path / "config.toml").write_text(resolved_toml(config))
    assert load_stored(tmp_path / "config.toml") == config


def test_a_stored_run_with_tools_of_others_is_read_without_them() -> None:
    table = {
        "task": {"name": "arithmetic", "digits": 4, "environment": "python:somebody_elses:Shell"},
        "tools": {"use": ["python:somebody_elses:wipe"], "timeout": 3.0},
        "rollout": {"max_turns": 4, "samples": 5},
        "reward": {"void_turns": "exclude"},
    }
    config: Config = parse_stored(table)
    assert not config.has_tools
    assert (config.task.arguments["digits"], config.tools.timeout, config.rollout.samples) == (4, 3.0, 5)


def test_a_stored_run_with_a_rule_of_others_is_still_one_on_its_file() -> None:
    config = parse_stored({"task": {"name": "file", "path": "/data/p.jsonl", "rule": "python:somebody_elses:near"}})
    assert (config.task.name, config.task.arguments["path"]) == ("file", "/data/p.jsonl")
    assert "somebody_elses" not in str(config)
    config = parse_stored({"task": {"name": "python:somebody_elses:Task", "digits": 4}})
    assert config.task == Config().task


def test_the_memory_estimate_counts_replies() -> None:
    def peak(*settings: str) -> int:
        return estimate_memory(load("tools", settings), "cpu").peak

    assert peak() < peak("rollout.max_observation_tokens=2000") < peak("rollout.max_observation_tokens=4000")
