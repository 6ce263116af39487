"""The tasks that a recipe can name, and how one is built: a function or class whose arguments are its options.

Two arguments are filled in by trimtab where a task has them: `split`, which problems are asked for, and in the test
split `size`, how many an evaluation takes. A task of the user's own is `python:MODULE:NAME`.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from trimtab.data.arithmetic import Arithmetic
from trimtab.data.countdown import Countdown
from trimtab.data.files import file_task, gsm8k_task
from trimtab.data.gym import gym_task
from trimtab.data.problems import Problem, Split, Task, check_index
from trimtab.data.verifiers_env import verifiers_agent, verifiers_task
from trimtab.own_parts import (
    Option,
    OwnPartError,
    errors_located,
    is_own,
    load_part,
    location,
    option_error,
    read_options,
)
from trimtab.text import nearest, shown

TaskBuilder = Callable[..., Task | None]

TASKS: Mapping[str, TaskBuilder] = {
    "arithmetic": Arithmetic,
    "countdown": Countdown,
    "gsm8k": gsm8k_task,
    "file": file_task,
    "gym:KIND": gym_task,
    "verifiers:ENV": verifiers_task,
}


def find_task(name: str) -> TaskBuilder:
    """Return the function that builds the task of a name."""
    if is_own(name):
        return load_part(name)
    family, _, member = name.partition(":")
    for each in TASKS:
        if member and each != name and each.startswith(f"{family}:"):
            return partial(TASKS[each], member)
    if name not in TASKS or member:
        raise ValueError(f"unknown task {shown(name)}: {nearest(name, TASKS)} (one of your own: python:MODULE:NAME)")
    return TASKS[name]


def task_options(name: str) -> dict[str, Option]:
    """Return the options of a task, in the order of its function's arguments."""
    build = find_task(name)
    options = read_options(name, build, skip=("split",) if is_own(name) else ("split", "seed"))
    for key in {"name", "environment"} & options.keys():
        raise option_error(name, build, key, f"is task.{key} already: call it otherwise")
    return options


def agent_of(name: str, arguments: Mapping[str, Any]) -> str | None:
    """Return the agent that a task brings, named as a part of the user's own; None: it brings none."""
    if not name.startswith("verifiers:"):
        return None
    return verifiers_agent(name.removeprefix("verifiers:"), arguments.get("args", {}))


def has_held_out_problems(name: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether a task has problems for evaluation: none has without `split`, nor a file without `eval_path`."""
    return "split" in inspect.signature(find_task(name)).parameters and arguments.get("eval_path", "") is not None


def build_task(name: str, arguments: Mapping[str, Any], split: Split, test_size: int) -> Task | None:
    """Build a task by name; None if there are no held-out problems."""
    build, given = find_task(name), dict(arguments)
    parameters = inspect.signature(build).parameters
    if split == "test" and not has_held_out_problems(name, given):
        return None
    if "split" in parameters:
        given["split"] = split
    if "size" in parameters and split == "test":
        given["size"] = test_size
    if not is_own(name):
        return build(**given)
    with errors_located(name, build):
        task = build(**given)
        problems = OwnTask(name, build, task)
        problems[0]  # a mistake is to be found now, not at the first step
    return problems


@dataclass(frozen=True)
class OwnTask:
    """A task of the user's own, whose problems are checked when they are read."""

    name: str
    build: TaskBuilder
    problems: Any  # a Task, or a list of problems

    def __len__(self) -> int:
        return len(self.problems)

    def __post_init__(self) -> None:
        if not hasattr(self.problems, "__len__") or not hasattr(self.problems, "__getitem__"):
            self._refuse(f"it returned {shown(self.problems)}, and not a list of problems")
        if len(self) < 1:
            self._refuse("it has no problems")

    def __getitem__(self, index: int) -> Problem:
        check_index(index, len(self))
        with errors_located(self.name, self.build):
            problem = self.problems[index]
        if not isinstance(problem, Problem):
            self._refuse(f"problem {index} is {shown(problem)}, and not a trimtab.data.Problem")
        messages = problem.prompt
        if not isinstance(messages, tuple | list) or not messages or not all(map(_is_message, messages)):
            advice = "a tuple of {'role': ..., 'content': ...}; user('text') makes one of a text"
            self._refuse(f"the prompt of problem {index} is {shown(messages)}: chat messages are {advice}")
        for key in ("answer", "rule", "source"):
            if not isinstance(getattr(problem, key), str):
                self._refuse(f"`{key}` of problem {index} is {shown(getattr(problem, key))}, and not text")
        return problem

    def _refuse(self, problem: str) -> typing.NoReturn:
        raise OwnPartError(f"{self.name}: {location(self.build)}: {problem}")


def _is_message(message: object) -> bool:
    if not isinstance(message, Mapping):
        return False
    role, content = message.get("role"), message.get("content")
    return isinstance(role, str) and isinstance(content, str) and bool(role and content)
