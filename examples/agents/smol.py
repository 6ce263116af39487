"""An agent of the framework smolagents, which multiplies with a tool.

Train it beside this file: `trimtab train smol.toml`. Needs `pip install "smolagents[openai]"`.
"""

from __future__ import annotations

from openai import OpenAI
from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

from trimtab.data import Problem


@tool  # type: ignore[untyped-decorator]
def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def solve(problem: Problem, client: OpenAI) -> float:
    """Return 1 if the agent's final answer is the right one."""
    model = OpenAIModel("policy", api_base=str(client.base_url), api_key=client.api_key)
    agent = ToolCallingAgent(tools=[multiply], model=model, max_steps=4, verbosity_level=LogLevel.OFF)
    answer = agent.run(problem.prompt[-1]["content"])
    return float(str(answer).strip() == problem.answer)
