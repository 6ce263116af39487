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

TRIES, SIZE, TEST_ONE_IN = 3, 7, 8  # seven numbers are found in three tries by halving


def problems(split: Split = "train") -> FixedTask:
    """Numbers to guess, each in a range such as `42-48 `; the warm start's solution is any number of the range."""
    found = []
    for low, place in product(range(10, 100 - SIZE), range(SIZE)):
        asked, secret = f"{low}-{low + SIZE - 1} ", low + place
        if split_of(asked, TEST_ONE_IN) == split:
            any_number = Random(derive_seed("guess", secret, asked)).randrange(low, low + SIZE)
            found.append(Problem(user(asked), str(secret), "exact", "guess", str(any_number)))
    return FixedTask("guess", found)


def solve(problem: Problem, client: OpenAI) -> float:
    """Let the model guess; return 1 if it finds the number."""
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": problem.prompt[0]["content"]}]
    for _ in range(TRIES):
        reply = client.chat.completions.create(model="policy", messages=messages, max_tokens=3)
        guess = (reply.choices[0].message.content or "").strip()
        if guess == problem.answer:
            return 1.0
        if not guess.isdecimal():
            return 0.0
        messages.append({"role": "assistant", "content": guess})
        messages.append({"role": "user", "content": "+" if int(guess) < int(problem.answer) else "-"})
    return 0.0
