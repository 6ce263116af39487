"""`task.name = "verifiers:ENV"`: the errors without the package, and with it whole rollouts of both of its forms.

The environments are modules as verifiers expects them, and the model is a scripted server. Run with verifiers 0.3.1.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from helpers.agents.scripted_server import Refusal, ScriptedServer, scripted, tool_call
from trimtab.data import Problem, agent_of, build_task, task_options
from trimtab.data.registry import find_task
from trimtab.own_parts import load_part
from trimtab.trainer.config import load

with_verifiers = pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="needs verifiers")

WORDS = """
    import verifiers as vf
    from datasets import Dataset

    def load_environment(rows=40, held_out=0, word="w", fail=False, group=False):
        def right(completion, answer):
            if fail:
                raise KeyError("the rubric's own mistake")
            return float(answer in str(completion[-1].content))

        def short(completion):
            return 1.0

        def of_all(completions):
            return [0.0] * len(completions)

        def make(start, count):
            numbers = range(start, start + count)
            rows = [{"question": f"Say {i}.", "answer": f"{word}{i}", "info": {"i": i}} for i in numbers]
            return Dataset.from_list(rows)

        return vf.SingleTurnEnv(
            dataset=make(0, rows), eval_dataset=make(1000, held_out) if held_out else None, system_prompt="Be short.",
            rubric=vf.Rubric(funcs=[of_all] if group else [right, short], weights=[1.0] if group else [1.0, 0.25]),
        )
"""
GUESS = """
    import verifiers as vf
    from datasets import Dataset

    class Guess(vf.MultiTurnEnv):
        async def setup_state(self, state):
            state["tries"] = 0
            return state

        async def env_response(self, messages, state, **kwargs):
            said = messages[-1].content or ""
            if state["answer"] in said:
                state["final_env_response"] = [{"role": "user", "content": "Right."}]
                return state["final_env_response"]
            state["tries"] += 1
            return [{"role": "user", "content": "Higher."}]

    def load_environment():
        def score(state):
            return 1.0 / (1 + state["tries"]) if state.get("final_env_response") else 0.0

        rows = Dataset.from_list([{"question": "Guess.", "answer": "3"}] * 20)
        return Guess(dataset=rows, rubric=vf.Rubric(funcs=[score]), max_turns=5)
"""
ADDING = """
    import threading

    import verifiers as vf
    from datasets import Dataset

    def add(a: int, b: int) -> int:
        '''Add two numbers.

        Args:
            a: The first.
            b: The second.
        '''
        return a + b

    def load_environment(thread=False):
        if thread:
            threading.Thread(target=threading.Event().wait, daemon=True).start()

        def right(completion, answer):
            return float(completion[-1].content == answer)

        rows = Dataset.from_list([{"question": "17+25?", "answer": "42"}] * 20)
        return vf.ToolEnv(dataset=rows, tools=[add], rubric=vf.Rubric(funcs=[right]), max_turns=4)
"""
TASKSET = """
    import verifiers.v1 as vf

    class WordData(vf.TaskData):
        answer: str = ""

    class WordTask(vf.Task[WordData]):
        @vf.reward
        async def right(self, task, trace) -> float:
            return float(task.answer in trace.last_reply)

    class WordsConfig(vf.TasksetConfig):
        word: str = "w"

    class Words(vf.Taskset[WordTask, WordsConfig]):
        def load(self):
            for i in range(40):
                prompt = f"Say {i}."
                data = WordData(idx=i, prompt=prompt, system_prompt="Be short.", answer=f"{self.config.word}{i}")
                yield WordTask(data, self.config.task)

    __all__ = ["Words"]
"""
NAMES = iter(range(10_000))
WriteModule = Callable[[str], str]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WriteModule]:
    """Write modules with names of their own beside a recipe in the current folder; return the environment's name."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)

    def write(text: str) -> str:
        name = f"tiny-{os.getpid()}-{next(NAMES)}"
        (tmp_path / f"{name.replace('-', '_')}.py").write_text(textwrap.dedent(text))
        return name

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("tiny_"):
            del sys.modules[name]


def problems(env: str, split: str = "train", size: int | None = None, **args: Any) -> list[Problem]:
    task = build_task(f"verifiers:{env}", {"args": args, "size": size}, split, 100)  # type: ignore[arg-type]
    assert task is not None
    return [task[number] for number in range(len(task))]


def solve(server: ScriptedServer, env: str, problem: Problem, **args: Any) -> float:
    """Run the environment's agent on a problem, against a server."""
    name = agent_of(f"verifiers:{env}", {"args": args})
    assert name is not None

    async def run() -> float:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="key-of-the-rollout", max_retries=0) as client:
            reward = await load_part(name)(problem, client)
        assert isinstance(reward, float)
        return reward

    return asyncio.run(run())


def by_number(prompt: str, numbers: str) -> str:
    """Return the word that is asked for."""
    return prompt.replace("Say ", numbers).rstrip(".")


# Without the package


def test_other_tasks_bring_no_agent() -> None:
    assert agent_of("arithmetic", {}) is None
    assert agent_of("gym:countdown", {}) is None


def test_its_options_are_known_without_the_package() -> None:
    assert list(task_options("verifiers:anything")) == ["size", "args"]
    config = load(None, ["task.name=verifiers:anything", "task.args={level = 3}", "run.eval_every=0"])
    assert config.task.arguments["args"] == {"level": 3}


@pytest.mark.parametrize("name", ["verifiers:", "verifiers:ENV", "verifierz:x"])
def test_a_name_without_an_environment_is_unknown(name: str) -> None:
    with pytest.raises(ValueError, match="unknown task"):
        find_task(name)


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is not None, reason="verifiers is here")
def test_without_the_package_it_says_what_to_install() -> None:
    with pytest.raises(
        ValueError, match=r"the task verifiers:wordle needs the package verifiers: .*install.*verifiers"
    ):
        problems("wordle")


# With it


@with_verifiers
def test_rows_are_problems_with_prompt_answer_and_the_whole_row(module: WriteModule) -> None:
    found = problems(module(WORDS), held_out=3)
    assert len(found) == 40
    assert found[7].prompt == ({"role": "system", "content": "Be short."}, {"role": "user", "content": "Say 7."})
    assert found[7].answer == "w7"
    assert found[7].extra["row"]["info"] == {"i": 7}


@with_verifiers
def test_the_rows_for_evaluation_are_the_held_out_ones(module: WriteModule) -> None:
    assert [each.answer for each in problems(module(WORDS), "test", held_out=3)] == ["w1000", "w1001", "w1002"]


@with_verifiers
def test_without_rows_for_evaluation_some_are_held_out_and_never_trained_on(module: WriteModule) -> None:
    env = module(WORDS)
    train, test = ({each.answer for each in problems(env, split, rows=200)} for split in ("train", "test"))
    assert len(train | test) == 200 and not train & test
    assert 5 <= len(test) <= 40
    assert {each.answer for each in problems(env, "train", size=10, rows=200)} < train
    with pytest.raises(ValueError, match=r"so few for training .* run\.eval_every = 0"):
        problems(env, "test", rows=1)


@with_verifiers
def test_a_single_turn_is_scored_by_the_rubric(module: WriteModule) -> None:
    env = module(WORDS)
    problem = problems(env)[5]
    with scripted(lambda messages, body: by_number(messages[-1]["content"], "w")) as server:
        assert solve(server, env, problem) == 1.25
        assert solve(server, env, problem, word="other") == 1.25  # the row says what is right, whatever made it
    assert server.keys == ["key-of-the-rollout"] * 2
    assert server.bodies[0]["messages"] == [dict(each) for each in problem.prompt]
    with scripted(lambda messages, body: "wrong") as server:
        assert solve(server, env, problem) == 0.25


@with_verifiers
def test_a_conversation_goes_on_until_the_environment_ends_it(module: WriteModule) -> None:
    env = module(GUESS)
    with scripted(lambda messages, body: str(len(messages) // 2 + 1)) as server:  # 1, 2, 3
        assert solve(server, env, problems(env)[0]) == pytest.approx(1 / 3)
    assert [len(body["messages"]) for body in server.bodies] == [1, 3, 5]


@with_verifiers
@pytest.mark.parametrize("thread", [False, True])
def test_tools_of_the_environment_are_called(module: WriteModule, thread: bool) -> None:
    env = module(ADDING)

    def script(messages: list[dict[str, Any]], body: dict[str, Any]) -> Any:
        return messages[-1]["content"] if messages[-1]["role"] == "tool" else tool_call("add", a=17, b=25)

    with scripted(script) as server:
        assert solve(server, env, problems(env, thread=thread)[0], thread=thread) == 1.0
    assert server.bodies[0]["tools"][0]["function"]["name"] == "add"


@with_verifiers
def test_an_environment_is_loaded_once_unless_it_has_threads(module: WriteModule) -> None:
    env = module(ADDING)
    for thread in (False, True):
        before, name = threading.active_count(), agent_of(f"verifiers:{env}", {"args": {"thread": thread}})
        assert name is not None and load_part(name) is load_part(name)
        assert threading.active_count() == before + thread


@with_verifiers
def test_what_the_policy_brings_about_is_scored_and_what_the_server_does_is_an_error(module: WriteModule) -> None:
    env = module(WORDS)
    problem = problems(env)[0]
    for refused in ("context_length_exceeded", "token_budget_exceeded"):
        with scripted(lambda messages, body, code=refused: Refusal(400, code)) as server:
            assert 0.0 <= solve(server, env, problem) <= 0.25
    with scripted(lambda messages, body: "") as server:  # which verifiers takes for an error of the model's server
        assert 0.0 <= solve(server, env, problem) <= 0.25
    with (
        scripted(lambda messages, body: Refusal(500, "broken")) as server,
        pytest.raises(RuntimeError, match="ended with ModelError"),
    ):
        solve(server, env, problem)


@with_verifiers
def test_a_mistake_of_a_reward_function_is_heard(module: WriteModule) -> None:
    env = module(WORDS)
    with scripted(lambda messages, body: "w0") as server, pytest.raises(RuntimeError, match="the rubric's own mistake"):
        solve(server, env, problems(env)[0], fail=True)


@with_verifiers
def test_an_environment_that_cannot_be_used_is_an_error_in_words(module: WriteModule) -> None:
    with pytest.raises(ValueError, match="there is no module no_such_words in "):
        problems("no-such-words")
    with pytest.raises(ValueError, match=r"tiny_.*\.py:\d+: ValueError: its own"):
        problems(module("def load_environment():\n    raise ValueError('its own')\n"))
    with pytest.raises(ValueError, match="unexpected keyword argument 'level'"):
        problems(module(WORDS), level=3)
    with pytest.raises(ValueError, match="scores the rollouts of a prompt together"):
        problems(module(WORDS), group=True)
    with pytest.raises(ValueError, match="__all__"):
        problems(module("x = 1\n"))


@with_verifiers
def test_signals_do_what_they_did_before(module: WriteModule) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    problems(module(WORDS))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@with_verifiers
def test_rows_of_a_taskset_are_problems(module: WriteModule) -> None:
    env = module(TASKSET)
    found = problems(env, taskset={"word": "v"})
    assert found[0].prompt == ({"role": "system", "content": "Be short."}, {"role": "user", "content": "Say 0."})
    assert all(each.answer.startswith("v") for each in found)
    assert 0 < len(problems(env, "test")) < len(found)


@with_verifiers
@pytest.mark.skipif(shutil.which("uv") is None, reason="programs of a taskset are started with uv")
def test_a_taskset_is_solved_by_its_program_and_scored(module: WriteModule) -> None:
    env = module(TASKSET)
    problem = problems(env)[3]
    with scripted(lambda messages, body: by_number(messages[-1]["content"], "w")) as server:
        assert solve(server, env, problem) == 1.0
    assert server.keys == ["key-of-the-rollout"]
    with scripted(lambda messages, body: "wrong") as server:
        assert solve(server, env, problem) == 0.0
    with scripted(lambda messages, body: Refusal(400, "token_budget_exceeded")) as server:
        assert solve(server, env, problem) == 0.0
    with scripted(lambda messages, body: Refusal(404, "lost")) as server, pytest.raises(RuntimeError, match="lost"):
        solve(server, env, problem)
