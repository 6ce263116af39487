"""An agent of the user's own for runs inside TRL and verl: two questions that go on from each other, or that do not."""

from __future__ import annotations

from typing import Any

from trimtab.data import Problem


async def solve(problem: Problem, client: Any) -> float:
    """Ask twice in one conversation; pay for digits."""
    messages: list[dict[str, Any]] = [dict(message) for message in problem.prompt]
    paid = 0.0
    for _ in range(2):
        reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=3)
        text = reply.choices[0].message.content or ""
        paid += sum(map(str.isdigit, text)) + len(text) / 100
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "1+1="}]
    return paid


def ask_apart(problem: Problem, client: Any) -> float:
    """Ask two questions that have nothing to do with each other: two branches; odd answers are failures."""
    paid = 0.0
    for question in (problem.prompt[-1]["content"], "1+2="):
        message = {"role": "user", "content": question}
        reply = client.chat.completions.create(model="policy", messages=[message], max_tokens=4)
        paid += len(reply.choices[0].message.content or "")
    return paid


def leave_it(problem: Problem, client: Any) -> None:
    """Leave the reward to the engine."""
    client.chat.completions.create(model="policy", messages=list(problem.prompt))


def pay_each(problem: Problem, client: Any) -> list[float]:
    """Return a reward for each request."""
    client.chat.completions.create(model="policy", messages=list(problem.prompt))
    return [1.0]


def say_nothing(problem: Problem, client: Any) -> float:
    """Ask nothing."""
    return 1.0


def sometimes(problem: Problem, client: Any) -> float:
    """Fail on odd problems."""
    reply = client.chat.completions.create(model="policy", messages=list(problem.prompt), max_tokens=3)
    if int(problem.answer) % 4 == 1:
        raise RuntimeError("an odd problem")
    return float(len(reply.choices[0].message.content or ""))
