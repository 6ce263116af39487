"""A game as an example of an agent: guess a number in three tries, told after each whether it is higher or lower.

The recipe `agent` trains it. Task and agent are functions as anybody writes them; see docs/agents.md.
"""

from __future__ import annotations

from itertools import product
from random import Random
from typing import TYPE_CHECKING

from trimtab.data.problems import FixedTask, Problem, Split, derive_seed, split_of, user

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.chat import ChatCompletionMessageParam

TRIES, GAMES, MOST, TEST_ONE_IN = 3, 100, 5, 8  # three tries that ignore the hints find three of the five


def problems(split: Split = "train") -> FixedTask:
    """Games with a number from 1 to 5, as `42= `; the warm start's solution is any of these numbers."""
    found = []
    for game, secret in product(range(GAMES), range(1, MOST + 1)):
        asked = f"{game}= "
        if split_of(asked, TEST_ONE_IN) == split:
            other = Random(derive_seed("guess", game, secret)).randint(1, MOST)
            found.append(Problem(user(asked), str(secret), "exact", "guess", str(other)))
    return FixedTask("guess", found)


def solve(problem: Problem, client: OpenAI) -> float:
    """Let the model guess; return 1 if it finds the number."""
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": problem.prompt[0]["content"]}]
    for _ in range(TRIES):
        reply = client.chat.completions.create(model="policy", messages=messages, max_tokens=2)
        guess = (reply.choices[0].message.content or "").strip()
        if guess == problem.answer:
            return 1.0
        if guess not in map(str, range(1, MOST + 1)):
            return 0.0
        messages.append({"role": "assistant", "content": guess})
        messages.append({"role": "user", "content": "+" if guess < problem.answer else "-"})
    return 0.0
