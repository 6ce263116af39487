"""Conversations in verl: a parser that finds calls in what a random model writes, and the inputs of a run with tools.

verl loads this module by itself in every process, as `verl_cpu`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser

FORMAT = "equals"
# Notes what there was to grade, and pays for the length of the last message.
REWARD = """
import json
from pathlib import Path
from trimtab.engines.verl.reward import compute_score as graded

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    last = extra_info["last_message"]
    by_rule = graded(data_source, solution_str, last, extra_info, rule="exact")
    noted = {"whole": solution_str, "last": last, "turns": int(extra_info["num_turns"]), "acc": by_rule["acc"]}
    with (Path(__file__).parent / "graded.jsonl").open("a") as file:
        file.write(json.dumps(noted) + "\\n")
    return len(last) / 10
"""


@ToolParser.register(FORMAT)
class EqualsParser(ToolParser):
    """Every answer that ends with "=" is a call of the interpreter, in which a counter goes on from call to call."""

    tool = "python_session"
    arguments: Any = {"code": "n = globals().get('n', 100) + 1; print(n)"}  # noqa: RUF012

    @property
    def stop_token_ids(self) -> list[int]:
        return [self.tokenizer.convert_tokens_to_ids("=")]

    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        text = self.tokenizer.decode(responses_ids, skip_special_tokens=True)
        calls = [FunctionCall(name=self.tool, arguments=json.dumps(self.arguments))] if text.endswith("=") else []
        return text, calls


def write_tools(folder: Path) -> list[str]:
    """Write the tools and the reward of a run with conversations; return its settings."""
    (folder / "reward.py").write_text(REWARD)
    rollout = "actor_rollout_ref.rollout"
    return [
        "data.max_response_length=48",
        f"{rollout}.agent.default_agent_loop=trimtab_tool_agent",
        "+trimtab.tools=[python_session,calculator]",
        "+trimtab.tool_timeout=20",
        f"{rollout}.multi_turn.format={FORMAT}",
        f"{rollout}.multi_turn.max_assistant_turns=3",
    ]
