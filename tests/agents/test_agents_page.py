"""docs/agents.md: its agents run as written, and its tables say what the server takes and where its limits are."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest

from helpers.agents.scripted_server import scripted, tool_call
from trimtab.agents import NEW_ROOTS, EndpointLimits
from trimtab.agents.chat_requests import IGNORED, IMPOSED, READ, REFUSED
from trimtab.data import Problem, user
from trimtab.engines.options import EngineOptions
from trimtab.trainer.config import AgentConfig, load

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
PROBLEM = Problem(user("7+5="), "12", "exact", "test")


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of the page, where Python looks for modules."""
    for name, code in re.findall(r"<!-- file: (.*?) -->\n```py\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)


def row(first: str) -> list[str]:
    """The cells of the table row that begins with these words."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def names(cell: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", cell)))


@pytest.mark.parametrize(("answers", "reward"), [(["12"], 1.0), (["twelve", "12"], 1.0), (["?", "!"], 0.0)])
def test_the_agent_before_and_after(answers: list[str], reward: float, monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted(lambda messages, _: answers[len(messages) // 2]) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "a")
        before, after = importlib.import_module("before"), importlib.import_module("my_agent")
        assert asyncio.run(before.answer("7+5=")) == answers[-1]

        async def run() -> Any:
            async with openai.AsyncOpenAI() as client:
                return await after.solve(PROBLEM, client)

        assert asyncio.run(run()) == reward
        importlib.sys.modules.pop("before")  # type: ignore[attr-defined]
    half = len(server.bodies) // 2
    assert [body["messages"] for body in server.bodies[:half]] == [body["messages"] for body in server.bodies[half:]]


def test_the_agent_of_smolagents() -> None:
    pytest.importorskip("smolagents")
    smol = importlib.import_module("smol_agent")
    with scripted(lambda *_: tool_call("final_answer", answer="12")) as server:
        assert smol.solve(PROBLEM, openai.OpenAI(base_url=server.url, api_key="a")) == 1.0


def test_the_table_of_parameters_is_complete() -> None:
    imposed = {"model", "temperature", "top_p", *IMPOSED}
    assert names(row("taken as they are")[1]) == {*READ} - imposed
    assert names(row("imposed by the run")[1]) == imposed
    assert names(row("without effect")[1]) == {*IGNORED}
    assert names(row("refused")[1]) == {*REFUSED}


def test_the_limits_are_those_of_the_server() -> None:
    limits = EndpointLimits(1)
    for words, value in {
        "requests of a rollout": limits.max_requests,
        "requests of a rollout at one time": limits.max_waiting,
        "messages of a request": limits.max_messages,
        "bytes of a request": limits.max_body,
        "seconds for a request to arrive": int(limits.body_seconds),
    }.items():
        assert row(words)[1] == f"{value:,}"
    assert row("open connections of all rollouts")[1].startswith(f"{limits.max_connections:,}, or a quarter of")
    assert row("seconds of a rollout")[1] == f"`agent.timeout`, {AgentConfig().timeout:g}"


def test_reasons_and_options_are_all_named() -> None:
    assert all(f"`{name}`" in PAGE for name in NEW_ROOTS)
    assert all(f"`{name}`" in PAGE for name in EngineOptions.model_fields if name.startswith("agent"))


def test_the_versions_are_those_that_are_tested() -> None:
    requirements = Path(__file__).parents[2] / "requirements"
    words = PAGE.partition("### Tested with\n")[2]
    found = dict(re.findall(r"(openai|smolagents|verifiers|verl|TRL) (\d[\d.]*\d)", words))
    for name, file in [
        ("openai", "dev"), ("smolagents", "dev"), ("verifiers", "verifiers"), ("verl", "engines"), ("TRL", "engines"),
    ]:  # fmt: skip
        assert f"\n{name.lower()}=={found[name]} " in (requirements / f"{file}.txt").read_text(), name


def test_every_measured_seed_of_the_recipe_has_learnt() -> None:
    result = json.loads((Path(__file__).parents[2] / "benchmarks/results/agent-recipe-cpu.json").read_text())
    steps = load("agent", []).run.steps
    for run in result["runs"]:
        (first, before), (last, after) = run["held_out"][0], run["held_out"][-1]
        assert (first, last) == (0, steps), "measured with another recipe: run benchmarks/agent_recipe.py"
        assert before < 0.6 < after, "three of five numbers are found without a look at the hints"


def test_the_numbers_of_the_example_are_right(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "docs/agents.md", "exec"), {})
    said = capsys.readouterr().out.splitlines()
    assert said == re.findall(r"# (\[.*\])", code)
