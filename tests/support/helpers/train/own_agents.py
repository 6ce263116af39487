"""Agents for tests of runs: some that work, and some that fail in every way."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import time
from typing import Any

from helpers.train.bad_tools import Game
from trimtab.data import FixedTask, Problem, Split, user

NOTES = "TRIMTAB_TEST_NOTES"  # a named pipe, into which agents write lines
KINDS = 8  # of behaviour of `mixed`
FOREVER = 10_000


def _messages(problem: Problem) -> list[Any]:
    return [dict(message) for message in problem.prompt]


def _note(text: str) -> None:
    """Tell a test something, in a line."""
    with open(os.environ[NOTES], "w") as pipe:
        pipe.write(text + "\n")


def kinds(split: Split = "train") -> FixedTask:
    """Return a problem for each kind of behaviour of `mixed`."""
    problems = [Problem(user("1+1="), "2", "exact", "kinds", extra={"kind": kind}) for kind in range(KINDS)]
    return FixedTask("kinds", problems)


async def twice(problem: Problem, client: Any) -> float:
    """Ask, and go on from the answer; pay for its length, so that every step has a signal."""
    messages = _messages(problem)
    first = await client.chat.completions.create(model="policy", messages=messages, max_tokens=2)
    answer = first.choices[0].message.content or ""
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "1+1="}]
    second = await client.chat.completions.create(model="policy", messages=messages, max_tokens=2)
    return len(answer) - 0.25 * len(second.choices[0].message.content or "")


def graded(problem: Problem, client: Any) -> None:
    """Leave the reward to the task's rule."""
    client.chat.completions.create(model="policy", messages=_messages(problem))


def each(problem: Problem, client: Any) -> list[float]:
    """Ask three times the same, and pay the requests by their order."""
    for _ in range(3):
        client.chat.completions.create(model="policy", messages=_messages(problem), max_tokens=1)
    return [0.0, 1.0, random.random()]


def broken(problem: Problem, client: Any) -> float:
    """Raise, with the key in the message."""
    client.chat.completions.create(model="policy", messages=_messages(problem), max_tokens=1)
    raise RuntimeError(f"no such thing as {client.api_key}")


def silent(problem: Problem, client: Any) -> float:
    """Ask nothing."""
    return 1.0


def greedy_for_tokens(problem: Problem, client: Any) -> float:
    """Ask until the budget is used up."""
    while True:
        client.chat.completions.create(model="policy", messages=_messages(problem), max_tokens=2)


GUESS = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Guess the number.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "string", "description": "A whole number."}},
            "required": ["number"],
        },
    },
}


def play(problem: Problem, client: Any) -> float:
    """Play `Game` as an agent: what trimtab does with an environment, in three turns."""
    game, messages = Game(), _messages(problem)
    for _ in range(3):
        reply = client.chat.completions.create(model="policy", messages=messages, tools=[GUESS])
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            text = game.guess(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "name": "guess", "content": text})
    return game.reward(None)


def process_id(problem: Problem, client: Any) -> float:
    """Return the number of the process; with a kind, end it."""
    if problem.extra["kind"]:
        os.abort()
    return float(os.getpid())


def mixed(problem: Problem, client: Any) -> Any:
    """Behave as the problem's number says: every sort of failure, and good rollouts between them."""
    client.chat.completions.create(model="policy", messages=_messages(problem), max_tokens=1)
    kind = int(problem.extra["kind"])
    if kind == 1:
        time.sleep(FOREVER)
    if kind == 2:
        os.abort()
    if kind == 3:
        for _ in range(200):
            sys.stdout.write("x" * 100_000)
    if kind == 4:
        subprocess.Popen(["sleep", str(FOREVER)], start_new_session=True)
        subprocess.Popen(f"setsid sh -c 'sleep {FOREVER} & sleep {FOREVER}' &", shell=True)
        time.sleep(FOREVER)
    if kind == 5:
        return "a text"
    if kind == 6:
        sys.exit(3)
    if kind == 7:
        return [0.0] * 1_000
    return 1.0


async def never(problem: Problem, client: Any) -> float:
    """Ask, start a process in a session of its own, name both, and hang."""
    await client.chat.completions.create(model="policy", messages=_messages(problem), max_tokens=1)
    child = subprocess.Popen(["sleep", str(FOREVER)], start_new_session=True)
    _note(f"{os.getpid()} {child.pid}")
    await asyncio.sleep(FOREVER)
    return 0.0


def lingering(problem: Problem, client: Any) -> float:
    """Leave a thread behind that asks once the rollout is over, and name what it is told."""
    client.chat.completions.create(model="policy", messages=_messages(problem), max_tokens=1)

    def ask() -> None:
        told = ""
        while not told:
            try:
                client.with_options(max_retries=0).models.list()
            except Exception as error:
                told = f"{type(error).__name__} {getattr(error, 'code', '')}"
        _note(told)

    threading.Thread(target=ask, daemon=True).start()
    return float(problem.answer) % 3
