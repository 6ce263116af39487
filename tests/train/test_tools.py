"""Training with tools: what is graded, paid, excluded and counted, whatever a tool does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from helpers.train.scripted_turns import trainer_with_tools
from trimtab.data import FixedTask, Problem, Sample
from trimtab.data.problems import user
from trimtab.record.conversation import read_calls, read_observations
from trimtab.record.recorder import response_columns
from trimtab.trainer.config import parse
from trimtab.trainer.model import Policy, load_policy
from trimtab.trainer.train.loop import train_step
from trimtab.trainer.train.metrics import METRICS, StepResult
from trimtab.trainer.train.recording import tokenizer_vocabulary
from trimtab.trainer.train.rollouts import collect_rollouts, evaluate
from trimtab.trainer.train.trainer import RunProgress, Trainer

TOOLS = "python:helpers.train.bad_tools"


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy("demo-tools", device="cpu", seed=0)


@pytest.fixture
def build(policy: Policy) -> Iterator[Any]:
    """Build trainers for one problem, whose answer is 42, and close them at the end."""
    built: list[Trainer] = []

    def make(scripts: Sequence[Sequence[str]], rule: str = "exact", **sections: dict[str, Any]) -> Trainer:
        limits = {"prompts": 1, "samples": max(len(scripts), 2), "max_new_tokens": 64, "max_turns": 2}
        rollout = {**limits, "max_observation_tokens": 24, **sections.pop("rollout", {})}
        sections = {"tools": {"use": ["calculator"]}, **sections}
        config = parse({"objective": "grpo", "rollout": rollout, **sections})
        task = FixedTask("one", (Problem(user("6*7="), "42", rule, "one"),))
        built.append(trainer_with_tools(policy, config, scripts, task))
        return built[-1]

    yield make
    for trainer in built:
        trainer.close()


def responses(trainer: Trainer) -> list[Sample]:
    rollouts = collect_rollouts(trainer, RunProgress())
    return sorted([*rollouts.responses, *rollouts.excluded], key=lambda each: each.response.sample)


def step(trainer: Trainer) -> StepResult:
    return train_step(trainer, RunProgress())


# --- what is graded and counted


def test_the_last_message_is_graded_and_calls_are_counted(build: Any) -> None:
    result = step(build([["calculator(6*7)", "42"], ["42"], ["calculator(6*)", "41"], ["calculator(6*7)", "41"]]))
    metrics = result.metrics
    assert metrics["reward/mean"] == 0.5
    assert metrics["conversation/turns_mean"] == 7 / 4
    assert metrics["conversation/called_share"] == 0.5
    assert (metrics["tools/calls"], metrics["tools/ok"], metrics["tools/exception"]) == (3, 2, 1)
    assert metrics["tools/failed_share"] == pytest.approx(1 / 3)
    assert metrics["conversation/observed_tokens_mean"] > 0
    assert 0 <= metrics["time/tools_wait_share"] <= 1
    assert {name for name in metrics if name.startswith(("conversation/", "tools/", "time/tool"))} <= METRICS.keys()
    assert any("[calculator] 42" in sample.response for sample in result.samples)


def test_a_record_has_the_turns_of_a_conversation(build: Any) -> None:
    trainer = build([["calculator(6*7)", "calculator(6*7"], ["42"]])
    graded = responses(trainer)
    tokenizer = trainer.policy.tokenizer
    vocabulary = tokenizer_vocabulary(tokenizer, len(tokenizer))
    table = response_columns(1, [(0, sample) for sample in graded], vocabulary)
    (call,) = read_calls(table, 0)
    assert (call.turn, call.tool, call.outcome) == (0, "calculator", "ok")
    assert json.loads(call.arguments) == {"expression": "6*7"} and call.seconds >= 0
    (observed,) = read_observations(table, 0)
    assert observed.after == len("calculator(6*7)") + 1  # and the end token
    start, end = graded[0].response.observed[0]
    assert observed.tokens == end - start
    assert observed.text == vocabulary.decode(graded[0].response.tokens[start:end].tolist())
    assert table["ended"] == [graded[0].conversation.ended, "answer"]  # type: ignore[union-attr]
    assert (table["calls"][1], table["observations"][1]) == ("", "")


def test_only_sampled_tokens_are_trained_on(build: Any) -> None:
    trainer = build([["calculator(6*7)", "42"], ["calculator(6*7)", "41"]])
    sampled = len("calculator(6*7)") + len("42") + 2
    assert step(trainer).metrics["tokens/count"] == 2 * sampled
    assert step(trainer).metrics["response/length_mean"] == sampled


@pytest.mark.parametrize("written", [r"\boxed{42}", "I do not know"])
def test_what_a_tool_prints_earns_nothing(build: Any, written: str) -> None:
    trainer = build([["tell(it)", written], ["41"]], "boxed", tools={"use": [f"{TOOLS}:tell"]})
    graded = responses(trainer)[0]
    assert r"\boxed{42}" in graded.conversation.messages[1].text  # type: ignore[union-attr]
    assert graded.reward == float(written == r"\boxed{42}")


@pytest.mark.parametrize(
    ("tool", "outcome"), [("hang", "timeout"), ("crash", "killed"), ("flood", "output"), ("fail", "exception")]
)
def test_a_run_goes_on_whatever_a_tool_does(build: Any, tool: str, outcome: str) -> None:
    trainer = build(
        [[f"{tool}(it)", "41"], ["42"], [f"{tool}(it)", "42"]], tools={"use": [f"{TOOLS}:{tool}"], "timeout": 1.0}
    )
    metrics = step(trainer).metrics
    assert (metrics["tools/calls"], metrics[f"tools/{outcome}"], metrics["tools/ok"]) == (2, 2, 0)
    assert metrics["conversation/called_share"] == 0
    assert metrics["reward/mean"] == pytest.approx(2 / 3)  # paid by the answer alone
    assert step(trainer).metrics["tools/calls"] == 2


def test_a_failure_of_the_users_own_tool_is_shown_once(build: Any) -> None:
    trainer = build([["fail(it)", "41"], ["fail(it)", "42"]], tools={"use": [f"{TOOLS}:fail"]})
    step(trainer)
    errors = trainer.tool_use.take_errors()
    assert len(errors) == 1 and "it is broken" in errors[0]
    step(trainer)
    assert trainer.tool_use.take_errors() == []


def test_the_environment_pays_first(build: Any) -> None:
    scripts = [["guess(7)", "42"], ["guess(42)", "no idea"], ["42"]]
    trainer = build(scripts, task={"environment": f"{TOOLS}:Game"}, tools={})
    assert [response.reward for response in responses(trainer)] == [0.5, 1.0, 0.0]
    metrics = step(trainer).metrics
    assert metrics["reward/score"] == 0.5


def test_a_reward_too_large_to_learn_from_is_a_failure_like_nan(build: Any) -> None:
    scripts = [["1e31"], ["nan"], ["-2e30"], ["1e30"], ["0"]]
    trainer = build(scripts, task={"environment": f"{TOOLS}:Boundless"}, tools={})
    graded = responses(trainer)
    assert [response.verdict.kind for response in graded] == ["crashed"] * 3 + ["correct", "wrong"]
    assert [response.excluded for response in graded] == [True] * 3 + [False] * 2
    assert "reward returned 1e+31: return a finite number of at most 1e+30, or None" in graded[0].verdict.error
    assert step(trainer).metrics["reward/crashed_share"] == 3 / 5


def test_void_turns_are_counted_and_can_be_left_out(build: Any) -> None:
    scripts = [["calculator(6*7", "42"], ["42"], ["41"], [" "]]
    kept = build(scripts)
    assert step(kept).metrics["conversation/void_share"] == 0.5
    assert not any(response.excluded for response in responses(kept))
    excluded = [response.excluded for response in responses(build(scripts, reward={"void_turns": "exclude"}))]
    assert excluded == [True, False, False, True]


def test_a_call_in_the_last_turn_is_not_run(build: Any) -> None:
    metrics = step(build([["calculator(6*7)", "calculator(6*7)"], ["42"]])).metrics
    assert (metrics["conversation/out_of_turns_share"], metrics["tools/calls"]) == (0.5, 1)


def test_evaluation_has_tools_too(build: Any) -> None:
    trainer = build([["calculator(6*7)", "42"]])
    trainer.test_task = trainer.task
    metrics = evaluate(trainer)
    assert (metrics["eval/accuracy"], metrics["eval/called_share"], metrics["eval/turns_mean"]) == (1, 1, 2)


def test_replies_that_do_not_fit_the_models_positions_are_refused(build: Any) -> None:
    trainer = build([["42"]], rollout={"max_observation_tokens": 200})
    with pytest.raises(ValueError, match=r"and replies of 202 that is more than the model's 128 positions"):
        step(trainer)
