"""Evaluation with tools: the last message is graded, what tools say is not; conversations are stored and counted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.evaluate.small_evals import Handler, RecordedProgress, Reply, body, served, serving, small, status
from trimtab.data import PromptTokens, Response, SamplingOptions, Turns
from trimtab.experiments.evaluate import native, report
from trimtab.experiments.evaluate.folder import EvalFolder
from trimtab.experiments.evaluate.run import EvalResult, evaluate, grade_evaluation, read_verdicts

SUM_TOOL = '''
def add(first: int, second: int) -> str:
    """Add two numbers.

    Args:
        first: One.
        second: The other.
    """
    return str(first + second)
'''


GAME = '''
class Game:
    def reset(self, problem) -> str:
        return "Find it."

    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: What it may be.
        """
        return "no"

    def reward(self, conversation) -> float:
        return 1.0
'''


def message(text: str | None, *calls: tuple[str, str], reason: str = "stop") -> Reply:
    """Reply with a message that calls tools, each by name and arguments."""
    made = [
        {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(calls)
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text, "tool_calls": made},
        "finish_reason": reason,
    }

    def reply(handler: Handler, request: dict[str, Any]) -> None:
        handler.send(200, json.dumps({"choices": [choice], "usage": {"completion_tokens": 5}}).encode())

    return reply


def run(folder: Path, *script: Reply, **changes: Any) -> tuple[EvalResult, list[Any], list[Any]]:
    """One sample of the first sum (1+1) from a server: the result, its requests, and the stored generations."""
    with serving(*script, otherwise=message("It is 2.")) as server:
        options = served(folder, server, tools="calculator", problems=1, samples=1, max_new_tokens=50, **changes)
        done = evaluate(options, RecordedProgress())
        return done, server.requests, EvalFolder(folder / "out").read()


def test_a_servers_call_is_run_and_its_reply_is_sent(tmp_path: Path) -> None:
    done, requests, (kept,) = run(tmp_path, message(None, ("calculator", '{"expression": "1+1"}')))
    assert [tool["function"]["name"] for tool in requests[0]["tools"]] == ["calculator"]
    assert [(m["role"], m["content"]) for m in requests[1]["messages"][-2:]] == [("assistant", ""), ("tool", "2")]
    assert requests[1]["messages"][-1]["tool_call_id"] == requests[1]["messages"][-2]["tool_calls"][0]["id"] == "c0"
    assert (requests[0]["max_tokens"], requests[1]["max_tokens"]) == (50, 45)
    assert done.metrics["gsm8k"].average is not None and done.metrics["gsm8k"].average.mean == 1.0
    assert (kept.text, kept.tokens, kept.conversation["ended"]) == ("It is 2.", 10, "answer")
    figures = done.tools["gsm8k"]
    assert (figures.turns, figures.calls, figures.ok_share, figures.answers_with_call_share) == (2.0, 1.0, 1.0, 1.0)


def test_what_a_tool_says_is_not_graded(tmp_path: Path) -> None:
    done, _, (kept,) = run(tmp_path, message(None, ("calculator", '{"expression": "1+1"}')), message("I do not know."))
    assert done.metrics["gsm8k"].average is not None and done.metrics["gsm8k"].average.mean == 0.0
    assert "2" in [m["text"] for m in kept.conversation["messages"] if m["role"] == "tool"]


def test_wrong_calls_are_told_and_counted(tmp_path: Path) -> None:
    wrong = [("calculator", "{"), ("nothing", "{}"), ("calculator", '{"expression": 1, "more": 2}')]
    done, requests, _ = run(tmp_path, message("I try.", *wrong))
    told = [m["content"] for m in requests[1]["messages"] if m["role"] == "tool"]
    assert len(told) == 3 and all(text.startswith("Error: ") for text in told)
    assert done.tools["gsm8k"].outcomes == {"bad_arguments": 1, "malformed": 1, "unknown_tool": 1}
    assert done.tools["gsm8k"].answers_with_call_share == 0.0


@pytest.mark.parametrize(
    "arguments", ['{"expression": NaN}', '{"a": ' + "[" * 800 + "]" * 800 + "}", '{"a": "\ud800"}']
)
def test_hostile_arguments_are_stored_and_read_again(arguments: str, tmp_path: Path) -> None:
    done, _, (kept,) = run(tmp_path, message(None, ("calculator", arguments)))
    assert kept.failed is None and len(kept.conversation["calls"]) == 1
    assert done.tools["gsm8k"].ok_share == 0.0


def test_the_key_in_a_call_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-4242")
    nested = json.dumps({"sk-secret-4242": "\\u0073k-secret-4242"})
    calls = [("sk-secret-4242", "{}"), ("calculator", nested), ("calculator", "sk-secret-4242")]
    run(tmp_path, message("I use sk-secret-4242", *calls))
    stored = b"".join(path.read_bytes() for path in sorted((tmp_path / "out").rglob("*")) if path.is_file())
    assert b"secret-4242" not in stored
    assert stored.count(b"(the key)") > 4


def test_a_conversation_ends_at_its_last_turn(tmp_path: Path) -> None:
    call = message(None, ("calculator", '{"expression": "1+1"}'))
    done, requests, (kept,) = run(tmp_path, call, call, call, max_turns=2)
    assert (len(requests), kept.conversation["ended"]) == (2, "turns")
    assert done.tools["gsm8k"].calls == 1.0, "the last call is not run: nobody would read its reply"


def test_a_message_cut_off_is_not_run(tmp_path: Path) -> None:
    cut = message("I will", ("calculator", '{"expr'), reason="length")
    _, requests, (kept,) = run(tmp_path, cut)
    assert (len(requests), kept.finished, kept.conversation["ended"], kept.conversation["calls"]) == (
        1,
        False,
        "tokens",
        [],
    )


def test_a_server_that_fails_in_the_middle_is_asked_again(tmp_path: Path) -> None:
    call = message(None, ("calculator", '{"expression": "1+1"}'))
    done, requests, (kept,) = run(tmp_path, call, status(503), body(b"no json"))
    assert len(requests) == 4 and kept.conversation["ended"] == "answer"
    done, requests, (kept,) = run(tmp_path / "refused", call, status(400))
    assert kept.failed and kept.conversation is None
    assert done.metrics["gsm8k"].failed_samples == 1, "not a wrong answer"


def test_many_calls_all_get_a_reply(tmp_path: Path) -> None:
    many = [("calculator", '{"expression": "1+1"}')] * 10
    _, requests, _ = run(tmp_path, message(None, *many))
    assert [m["content"] for m in requests[1]["messages"][-2:]] == ["Not run.", "Not run."]


class Scripted:
    """A sampler whose messages are given, one after the other, for every prompt and sample."""

    def __init__(self, tokenizer: Any, *texts: str) -> None:
        self.tokenizer, self.texts = tokenizer, texts

    def sample(
        self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions, turns: Turns | None = None
    ) -> list[list[Response]]:
        assert turns is not None
        return [
            [self._converse(prompt, sample, turns) for sample in range(options.samples)]
            for prompt in range(len(prompts))
        ]

    def _converse(self, prompt: int, sample: int, turns: Turns) -> Response:
        tokens: list[int] = []
        observed: list[tuple[int, int]] = []
        sampled = 0
        for text in self.texts:
            new = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
            tokens, sampled = tokens + new, sampled + len(new)
            turns.submit(prompt, sample, new)
            (reply,) = turns.replies(block=True)
            if reply.tokens is None:
                break
            observed.append((len(tokens), len(tokens) + len(reply.tokens)))
            tokens += reply.tokens
        return Response(tokens, [-0.5] * sampled, True, sample, tuple(observed))


def native_run(folder: Path, monkeypatch: pytest.MonkeyPatch, *texts: str, **changes: Any) -> EvalResult:
    """An evaluation of the demo model for tools whose messages are given."""
    monkeypatch.setattr(
        native.NativeGenerator, "sampler", property(lambda self: Scripted(self.policy.tokenizer, *texts))
    )
    defaults: dict[str, Any] = {"model": "demo-tools", "tools": "calculator", "max_turns": 2, "max_new_tokens": 40}
    defaults |= {"max_observation_tokens": 32, "problems": 2, "samples": 2}
    return evaluate(small(folder, **{**defaults, **changes}), RecordedProgress())


def test_a_model_here_calls_and_is_graded_by_its_last_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = native_run(tmp_path, monkeypatch, "calculator(1+1)", "It is 2")
    kept = EvalFolder(tmp_path / "out").read()
    assert [generation.text for generation in kept] == ["It is 2"] * 4
    assert kept[0].tokens == len("calculator(1+1)") + len("It is 2") + 2, "what the tool said is not counted"
    assert kept[0].entropy is not None and kept[0].logp == -0.5
    assert done.metrics["gsm8k"].average is not None and done.metrics["gsm8k"].average.mean == 0.5  # 1+1 and 2+3
    assert done.tools["gsm8k"].outcomes == {"ok": 4}
    report.write(done)
    text = (tmp_path / "out/result.md").read_text()
    assert "Tools, means per response" in text
    stored = json.loads((tmp_path / "out/result.json").read_text())
    assert stored["tools"]["gsm8k"]["answers_with_call_share"] == 1.0
    assert stored["settings"]["tools"]["use"] == ["calculator"]


def test_an_evaluation_with_tools_is_not_resumed_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native_run(tmp_path, monkeypatch, "It is 2")
    with pytest.raises(ValueError, match="tools"):
        native_run(tmp_path, monkeypatch, "It is 2", tools=None)


def test_a_function_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "summing.py").write_text(SUM_TOOL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    call = message(None, ("add", '{"first": 1, "second": 1}'))
    with serving(call, otherwise=message("It is 2.")) as server:
        options = served(tmp_path, server, tools="python:summing:add", problems=1, samples=1)
        done = evaluate(options, RecordedProgress())
    assert done.tools["gsm8k"].outcomes == {"ok": 1}


def test_an_environment_judges_its_conversations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "game.py").write_text(GAME)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    with serving(otherwise=message("I give up.")) as server:
        # One worker for all that tools do: nothing may wait for another thread in it.
        options = served(tmp_path, server, environment="python:game:Game", tool_workers=1, problems=2)
        done = evaluate(options, RecordedProgress())
        assert server.requests[0]["messages"][-1]["content"].endswith("Find it.")
    assert done.metrics["gsm8k"].average is not None and done.metrics["gsm8k"].average.mean == 1.0
    assert [kept.conversation["reward"] for kept in EvalFolder(tmp_path / "out").read()] == [1.0] * 6


def test_an_environment_that_fails_is_not_replaced_by_the_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "endless.py").write_text(GAME.replace("return 1.0", "return 1e31"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    with serving(otherwise=message("It is 2.")) as server:
        done = evaluate(served(tmp_path, server, environment="python:endless:Game", problems=2), RecordedProgress())
    assert {verdict.kind for verdict in read_verdicts(done.folder)[0].values()} == {"crashed"}
    assert "reward returned 1e+31: return a finite number of at most 1e+30" in done.folder.verdicts.read_text()
    assert done.metrics["gsm8k"].average is None


@pytest.mark.parametrize("key", ["ended", "messages", "calls", "reward", "error"])
def test_a_stored_conversation_of_any_kind_is_graded_again_or_answered_in_words(key: str, tmp_path: Path) -> None:
    done, _, _ = run(tmp_path, message(None, ("calculator", '{"expression": "1+1"}')))
    row = json.loads(done.folder.generations.read_text())
    absurd: list[Any] = [None, 1, 1e31, float("nan"), "x", [], {}, [1], [{}], [{"role": 1, "outcome": 1}], "missing"]
    for value in absurd:
        broken = {**row["conversation"], key: value}
        if value == "missing":
            del broken[key]
        done.folder.generations.write_text(json.dumps({**row, "conversation": broken}) + "\n")
        problem = ""
        try:
            grade_evaluation(done.folder, "number")
        except ValueError as error:
            problem = str(error)
        assert problem or value in (None, 1, "x", []), "one that may be stored so"
        assert not problem or f"generations.jsonl, row 1: not a generation (`conversation.{key}" in problem
        assert len(problem) < 1_000


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tools": "calculater"}, "calculater.*did you mean calculator"),
        ({"max_turns": 1}, "--max-turns 1: a model that calls a tool needs 2"),
        ({"tool_format": "xml"}, "--tool-format xml: there are"),
        ({"tool_timeout": 0.0}, "timeout"),
        ({"max_observation_tokens": 1}, "max_observation_tokens=1"),
        ({"max_observation_tokens": 4000}, "replies of tools up to"),
        ({"environment": "Notebook"}, "name a class of your own"),
    ],
)
def test_mistakes_are_found_before_sampling(
    changes: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=words):
        native_run(tmp_path, monkeypatch, "It is 2", **changes)
    assert not (tmp_path / "out/generations.jsonl").exists()


def test_a_server_has_its_own_format(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a server writes calls in its own way"):
        run(tmp_path, tool_format="hermes")
