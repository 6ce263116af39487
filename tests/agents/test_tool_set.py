"""Tools and environments of users: named, described, and run where they can do no harm."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from helpers.agents.tokenizers_of_models import PROBLEM
from trimtab.agents import Conversation, Message, ToolSet
from trimtab.data import Problem, user
from trimtab.own_parts import OwnPartError

HERE = "python:helpers.agents.misbehaving_tools"
USE = ["python", "python_session", "calculator", f"{HERE}:double", f"{HERE}:later", f"{HERE}:misbehave"]


@pytest.fixture(scope="module")
def tools() -> Iterator[ToolSet]:
    made = ToolSet(USE, environment=f"{HERE}:Counter", workers=2, memory_mb=512)
    yield made
    made.close()


def call(tools: ToolSet, tool: str, timeout: float = 20.0, **arguments: object) -> tuple[str, str]:
    opened = tools.open(PROBLEM)
    try:
        result = opened.call(tool, arguments, timeout)
        return result.outcome, result.text
    finally:
        opened.close()


def test_the_schemas_come_from_types_and_docstrings(tools: ToolSet) -> None:
    schemas = {schema["function"]["name"]: schema["function"] for schema in tools.schemas()}
    assert set(schemas) == {"python", "python_session", "calculator", "double", "later", "misbehave", "add", "fail"}
    assert schemas["add"]["description"] == "Add to the count."
    properties = schemas["add"]["parameters"]["properties"]
    assert properties["number"] == {"type": "integer", "description": "How much."}
    assert properties["sign"]["enum"] == ["+", "-"]
    assert schemas["add"]["parameters"]["required"] == ["number"]


@pytest.mark.parametrize(
    ("use", "problem"),
    [
        ([f"{HERE}:undocumented"], r"undocumented \(.*misbehaving_tools.py:\d+\): add a docstring"),
        ([f"{HERE}:untyped"], "add a type to the parameter text, as text: str"),
        ([f"{HERE}:undescribed"], "a line under Args: in the docstring"),
        ([f"{HERE}:any_number"], r"write \*numbers: .*int.* as named parameters"),
        ([f"{HERE}:Counter"], "is a class: name it as the environment"),
        ([f"{HERE}:nothing"], "has no nothing"),
        (["pyhton"], "there is no tool 'pyhton': did you mean python"),
        (["calculator", "calculator"], "two tools are called calculator"),
        (["python:notebook_tool"], "is registered here|put it in a file"),
        ([], "no tools: name some of python"),
    ],
)
def test_a_tool_that_cannot_be_used_is_named_at_the_start(use: list[str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ToolSet(use)


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        (f"{HERE}:WithoutReset", r"add a method reset\(self, problem\)"),
        (f"{HERE}:WithoutTools", "no public method"),
        (f"{HERE}:double", "an environment is a class"),
        ("Counter", "python:MODULE:NAME"),
    ],
)
def test_an_environment_that_cannot_be_used(environment: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ToolSet(environment=environment)


@pytest.mark.parametrize(
    ("tool", "arguments", "outcome", "text"),
    [
        ("calculator", {"expression": "2*3"}, "ok", "6"),
        ("calculator", {"expression": "9**9**9"}, "exception", "Error: the number is too large"),
        ("python", {"code": "print(2*3)"}, "ok", "6"),
        ("python", {"code": "2*3"}, "ok", "The program printed nothing."),
        ("python", {"code": "print(1)\n1/0"}, "exception", "ZeroDivisionError: division by zero"),
        ("double", {"number": 4}, "ok", "8"),
        ("later", {"text": "now"}, "ok", "now"),
        ("misbehave", {"how": "raise"}, "exception", "Error: ValueError: no such page"),
        ("misbehave", {"how": "segfault"}, "killed", "Error: it crashed"),
        ("misbehave", {"how": "exit"}, "killed", "Error: it crashed"),
        ("misbehave", {"how": "memory"}, "memory", "Error: it wanted more than 512 MB"),
        ("misbehave", {"how": "object"}, "exception", "returned a object, which is no text"),
        ("misbehave", {"how": "flood"}, "output", "xxx"),
        ("misbehave", {"how": "print"}, "ok", "printed"),
        ("misbehave", {"how": "none"}, "ok", "The tool returned nothing."),
        ("misbehave", {"how": "dict"}, "ok", '{"a": [1, null]}'),
        ("double", {"number": "4"}, "bad_arguments", "the argument number is '4', which is no integer. double takes"),
        ("double", {"number": True}, "bad_arguments", "which is no integer"),
        ("double", {}, "bad_arguments", "the argument number is missing. double takes (number: integer)"),
        ("double", {"nubmer": 4}, "bad_arguments", "unknown argument 'nubmer': did you mean number?"),
        ("add", {"number": 1, "sign": "*"}, "bad_arguments", "which is no one of +, -"),
        ("dobule", {}, "unknown_tool", "there is no tool 'dobule': did you mean double?"),
        ("reset", {"problem": {}}, "unknown_tool", "there is no tool 'reset'"),
    ],
)  # fmt: skip
def test_whatever_a_tool_does_is_an_outcome_in_words(
    tools: ToolSet, tool: str, arguments: dict[str, object], outcome: str, text: str
) -> None:
    told = call(tools, tool, **arguments)
    assert told[0] == outcome and text in told[1]
    assert len(told[1]) <= 65_536


@pytest.mark.parametrize(("tool", "how"), [("python", "while True: pass"), ("misbehave", "hang"), ("fail", "hang")])
def test_a_loop_is_killed(tools: ToolSet, tool: str, how: str) -> None:
    arguments = {"code": how} if tool == "python" else {"how": how}
    call(tools, "double", number=1)  # the processes have started
    assert call(tools, tool, timeout=0.2, **arguments) == ("timeout", "Error: it took more than 0.2 s")


def test_a_session_keeps_its_names_and_starts_anew_after_it_was_killed(tools: ToolSet) -> None:
    opened = tools.open(PROBLEM)
    assert opened.call("python_session", {"code": "x = 7"}, 5.0).outcome == "ok"
    assert opened.call("python_session", {"code": "print(x)"}, 5.0).text == "7"
    killed = opened.call("python_session", {"code": "while True: pass"}, 0.2)
    assert killed.outcome == "timeout" and "its names are gone" in killed.text
    assert "NameError" in opened.call("python_session", {"code": "print(x)"}, 5.0).text
    opened.close()


def test_an_environment_has_a_state_of_its_own_in_each_conversation(tools: ToolSet) -> None:
    first, second = tools.open(PROBLEM), tools.open(PROBLEM)
    texts = [opened.call("add", {"number": 2}, 5.0).text for opened in (first, second, first)]
    assert texts == ["2 of 6", "2 of 6", "4 of 6"]
    conversation = Conversation([Message("assistant", "done")])
    assert (first.reward(conversation, 5.0), second.reward(conversation, 5.0)) == (4.0, 2.0)
    assert isinstance(first.reward(Conversation(), 5.0), type(None))  # left to the task's rule
    failed = first.reward(Conversation([Message("assistant", "broken")]), 5.0)
    assert "RuntimeError: no reward" in getattr(failed, "error", "")
    for opened in (first, second):
        opened.close()


@pytest.mark.parametrize(("how", "outcome"), [("exit", "killed"), ("segfault", "killed"), ("orphan", "ok")])
def test_an_environment_that_died_stays_dead(tools: ToolSet, how: str, outcome: str) -> None:
    opened = tools.open(PROBLEM)
    result = opened.call("fail", {"how": how}, 5.0)
    assert (result.outcome, result.gone) == (outcome, outcome == "killed")
    again = opened.call("add", {"number": 1}, 5.0)
    assert again.outcome == ("killed" if result.gone else "ok")
    opened.close()


def test_what_reset_says_belongs_to_the_prompt(tools: ToolSet) -> None:
    assert tools.openings([PROBLEM, replace(PROBLEM, answer="9")], 5.0) == ["Count to 6.", "Count to 9."]
    with pytest.raises(OwnPartError, match=r"(?s)Counter: reset failed for data.jsonl:3: .*ValueError: no such goal"):
        tools.openings([replace(PROBLEM, answer="broken", location="data.jsonl:3")], 5.0)


def test_an_environment_in_trls_form() -> None:
    silent = ToolSet(environment=f"{HERE}:Silent")
    problem = Problem(user("q"), "6", "exact", "test", extra={"level": 3})
    opened = silent.open(problem)
    assert opened.call("look", {}, 20.0).text == "['answer', 'level', 'prompt'] 6"
    assert silent.openings([problem], 5.0) == [None] and not silent.has_reward
    opened.close()
    silent.close()


def test_a_problem_may_have_some_tools_only(tools: ToolSet) -> None:
    problem = replace(PROBLEM, extra={"tools": ["double"]}, location="data.jsonl:7")
    assert [schema["function"]["name"] for schema in tools.schemas(problem)] == ["double"]
    assert tools.open(problem).call("calculator", {"expression": "1"}, 1.0).outcome == "unknown_tool"
    with pytest.raises(ValueError, match=r"data.jsonl:7: the problem's tools name 'duoble'.* did you mean double\?"):
        tools.schemas(replace(problem, extra={"tools": ["duoble"]}))
    verl = replace(PROBLEM, extra={"tools": {"kwargs": {}}})  # something else of this name
    assert len(tools.schemas(verl)) == 8


def test_at_most_so_many_calls_run_at_once(tools: ToolSet) -> None:
    running, most, lock, both = 0, 0, threading.Lock(), threading.Barrier(2)

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        both.wait(20)  # passes only where two run side by side
        with lock:
            running -= 1

    for future in [tools.in_thread(work) for _ in range(6)]:
        future.result(20)
    assert most == tools.workers == 2


def test_nothing_here_imports_torch() -> None:
    code = "import sys, trimtab.agents, trimtab.agents.tool_process; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # Python 3.12 warns of what this tests
def test_a_forked_process_has_tools_of_its_own(tools: ToolSet) -> None:
    assert call(tools, "double", number=1) == ("ok", "2")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            future = tools.in_thread(lambda: call(tools, "double", number=2) + call(tools, "python", code="print(5)"))
            os.write(write, " ".join(future.result(60)).encode())
        finally:
            os._exit(0)
    os.close(write)
    assert os.read(read, 100) == b"ok 4 ok 5"
    os.close(read)
    os.waitpid(child, 0)
    assert call(tools, "double", number=3) == ("ok", "6")
