"""The agents in examples/agents, against a scripted server, with the openai package and smolagents as they are."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from helpers.agents.scripted_server import scripted, tool_call
from trimtab.data import Problem, user

EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"
PROBLEM = Problem(user("7+5="), "12", "exact", "test")


@pytest.fixture(autouse=True)
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


@pytest.mark.parametrize(("answers", "reward"), [(["12"], 1.0), (["3", "12"], 0.5), (["3", "4"], 0.0)])
def test_the_plain_agent_tries_twice(answers: list[str], reward: float) -> None:
    from plain import solve  # type: ignore[import-not-found]

    async def run(url: str) -> float:
        async with openai.AsyncOpenAI(base_url=url, api_key="a", max_retries=0) as client:
            found: float = await solve(PROBLEM, client)
        return found

    with scripted(lambda messages, body: answers[len(messages) // 2]) as server:
        assert asyncio.run(run(server.url)) == reward
    assert len(server.bodies) == len(answers)
    said = [message["content"] for message in server.bodies[-1]["messages"]]
    assert said == ["7+5=", *(text for answer in answers[:-1] for text in (answer, "7+5="))]


def test_the_agent_of_smolagents_multiplies_with_its_tool() -> None:
    pytest.importorskip("smolagents")
    from smol import solve  # type: ignore[import-not-found]

    def script(messages: list[dict[str, Any]], body: dict[str, Any]) -> Any:
        assert {tool["function"]["name"] for tool in body["tools"]} == {"multiply", "final_answer"}
        if len(messages) < 3:
            return tool_call("multiply", a=12, b=34)
        return tool_call("final_answer", answer="408") if "408" in json.dumps(messages[-1]) else "lost"

    problem = Problem(user("12*34="), "408", "exact", "test")
    with scripted(script) as server, openai.OpenAI(base_url=server.url, api_key="a") as client:
        assert solve(problem, client) == 1.0
    assert len(server.bodies) == 2
    with scripted(lambda *_: tool_call("final_answer", answer="7")) as server:
        assert solve(problem, openai.OpenAI(base_url=server.url, api_key="a")) == 0.0


def test_the_program_answers_with_what_most_of_its_requests_say() -> None:
    answers = iter(["3", "12", "12"])
    with scripted(lambda *_: next(answers)) as server:
        given = json.dumps({"prompt": list(PROBLEM.prompt), "answer": "12", "extra": {}})
        environment = {**os.environ, "OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "mine"}
        command = [sys.executable, str(EXAMPLES / "votes.py")]
        done = subprocess.run(command, input=given, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "12"
    assert server.keys == ["mine"] * 3
    assert [body["messages"] for body in server.bodies] == [list(PROBLEM.prompt)] * 3
