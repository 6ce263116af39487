"""Worked solutions with calls: what the assistant writes is trained on, what a tool says is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from trimtab.cli.display import PlainReporter
from trimtab.data import Arithmetic, Problem, read_rows, worked_solution, worked_solutions
from trimtab.trainer.config import Config, load
from trimtab.trainer.model import Policy, load_policy
from trimtab.trainer.train.conversations import ToolUse, build_tool_use, build_tools
from trimtab.trainer.train.loop import train
from trimtab.trainer.train.prompts import encode_problems
from trimtab.trainer.train.rollouts import evaluate
from trimtab.trainer.train.run import Run
from trimtab.trainer.train.run_folder import RunFolder
from trimtab.trainer.train.warm_start import worked_transcript


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy("demo-tools", device="cpu", seed=0)


@pytest.fixture(scope="module")
def tool_use(policy: Policy) -> Iterator[ToolUse]:
    config: Config = load("tools")
    built = build_tool_use(config, policy, build_tools(config))
    assert built is not None
    yield built
    built.close()


def test_a_tools_reply_is_context(policy: Policy, tool_use: ToolUse) -> None:
    problem = Arithmetic("product", 3, calls=1.0)[0]
    question, answer = problem.prompt[0]["content"].rstrip("="), problem.answer
    prompt = encode_problems(policy, [problem], tool_use)[0]
    transcript = worked_transcript(policy, problem, prompt, tool_use)
    ((start, end),) = transcript.observed
    tokens = list(transcript.response)
    assert policy.decode(tokens[:start]) == f"calculator({question})"
    assert policy.decode(tokens[start:end]).strip() == answer
    assert policy.decode(tokens[end:]) == answer
    assert policy.decode(list(transcript.sampled_tokens)) == f"calculator({question}){answer}"
    assert {tokens[start - 1], tokens[-1]} == {policy.tokenizer.eos_token_id}


ENVIRONMENT = '''
class Guess:
    def reset(self, problem) -> str:
        return f"{int(problem.answer)}+{problem.extra['plus']}"

    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: A number."""
        return "right"
'''


def test_an_environment_opens_the_worked_solutions_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: Policy
) -> None:
    (tmp_path / "opening_env.py").write_text(ENVIRONMENT)
    worked = [{"role": "assistant", "content": "guess(4)"}, {"role": "tool", "name": "guess", "content": "right"}]
    row = {"prompt": "?", "a": 4, "e": {"plus": 3}, "solution": [*worked, {"role": "assistant", "content": "4"}]}
    (tmp_path / "worked.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.chdir(tmp_path)
    columns = {"answer": "a", "extra": "e"}
    config = load(None, ["task.environment=python:opening_env:Guess", "rollout.max_turns=2"])
    use = build_tool_use(config, policy, build_tools(config))
    assert use is not None
    try:
        (problem,) = worked_solutions("worked.jsonl", "", columns)
        prompt = encode_problems(policy, [problem], use)[0]
        assert policy.decode(prompt).endswith("4+3")
        assert worked_transcript(policy, problem, prompt, use).observed
        (problem,) = worked_solutions("worked.jsonl", "", {})
        with pytest.raises(ValueError, match=r"worked\.jsonl, row 1 \(it has no answer; .*columns\.answer\)"):
            encode_problems(policy, [problem], use)
    finally:
        use.close()


def test_the_share_of_solutions_with_a_call_is_the_recipes() -> None:
    task = Arithmetic("product", 3, calls=0.3)
    called = [isinstance(task[n].solution, tuple) for n in range(500)]
    assert 0.25 < sum(called) / 500 < 0.35
    plain = Arithmetic("product", 3)
    assert [task[n].prompt for n in range(20)] == [plain[n].prompt for n in range(20)]
    with pytest.raises(ValueError, match="a story has no expression"):
        Arithmetic("words", calls=0.5)


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        (["assistant", "tool"], "it starts and ends with the assistant"),
        (["tool", "assistant"], "it starts and ends with the assistant"),
        (["assistant", "user", "assistant"], "messages of assistant, user, assistant"),
    ],
)
def test_a_solution_has_messages_of_assistant_and_tool(
    policy: Policy, tool_use: ToolUse, roles: list[str], message: str
) -> None:
    solution = tuple({"role": role, "content": "1"} for role in roles)
    problem = Problem(({"role": "user", "content": "1*1="},), "1", "exact", "mine", solution, location="mine, row 3")
    with pytest.raises(ValueError, match=message):
        worked_transcript(policy, problem, [1], tool_use)


def test_a_solution_with_a_call_needs_tools(policy: Policy) -> None:
    with pytest.raises(ValueError, match=r"calls a tool: set tools.use and rollout.max_turns"):
        worked_transcript(policy, Arithmetic("product", 3, calls=1.0)[0], [1], None)


def test_a_file_may_have_conversations_as_solutions(policy: Policy, tool_use: ToolUse, tmp_path: Path) -> None:
    messages = [
        {"role": "assistant", "content": "calculator(2*3)"},
        {"role": "tool", "name": "calculator", "content": "6"},
        {"role": "assistant", "content": "6"},
    ]
    (tmp_path / "worked.jsonl").write_text(json.dumps({"prompt": "2*3=", "solution": messages}) + "\n")
    ((where, row),) = read_rows(str(tmp_path / "worked.jsonl"))
    problem = worked_solution(where, row, "", {})
    assert problem.solution == tuple(messages)
    assert len(worked_transcript(policy, problem, [1], tool_use).observed) == 1
    with pytest.raises(ValueError, match=r"row 1: a chat message of `solution` is str 'hm'; it needs `role`"):
        worked_solution("row 1", {"prompt": "1", "solution": ["hm"]}, "", {})


def test_the_recipe_trains(tmp_path: Path) -> None:
    quick = ["run.steps=2", "warm_start.steps=3", "warm_start.cache=false", "run.eval_problems=8", "run.device=cpu"]
    quick += ["rollout.prompts=4", "rollout.samples=4", "run.report=false"]
    run = Run(load("tools", quick), RunFolder(tmp_path / "run"), PlainReporter(lambda text: None))
    train(run)
    start, *steps = run.folder.records()
    assert {"eval/accuracy", "eval/called_share"} <= start.keys()
    assert all("conversation/called_share" in record and "tools/calls" in record for record in steps)
    assert evaluate(run.trainer)["eval/turns_mean"] >= 1
