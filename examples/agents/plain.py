"""An agent on the openai package that may try twice: it says that an answer is wrong, and asks again.

Train it beside this file: `trimtab train plain.toml`.
"""

from __future__ import annotations

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from trimtab.data import Problem


async def solve(problem: Problem, client: AsyncOpenAI) -> float:
    """Return 1 for a right answer, 0.5 if it was the second."""
    question = problem.prompt[-1]["content"]
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": question}]
    for reward in (1.0, 0.5):
        reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=6)
        answer = reply.choices[0].message.content or ""
        if answer.strip() == problem.answer:
            return reward
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": question})  # the demo's model knows no words for "wrong"
    return 0.0
