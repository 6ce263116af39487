"""trimtab's grading rules as a reward function for verl.

`reward.custom_reward_function.path=pkg://trimtab.engines.verl.reward`, with `rule`, `correct` and `wrong` under
`+reward.custom_reward_function.reward_kwargs`. A rule that gives a number gives the score itself.

verl's reward managers decode the whole response, replies of tools included. Of a conversation the last assistant
message is graded, which trimtab's agent loop passes on; without it a conversation is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from trimtab.engines import AGENT_LOOP, AGENT_LOOP_KEY, LAST_MESSAGE
from trimtab.grading import grade
from trimtab.text import printable

_log = logging.getLogger(__name__)
_failed: set[str] = set()  # rules whose first error has been logged


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    rule: str = "math",
    correct: float = 1.0,
    wrong: float = 0.0,
    **_: Any,
) -> dict[str, Any]:
    """Grade a response: its score and, for verl's logs, whether it is correct and the extracted answer."""
    verdict = grade(_policys_text(solution_str, extra_info or {}), str(ground_truth), rule, extra_info)
    is_correct = verdict.kind == "correct"
    if verdict.kind == "crashed" and rule not in _failed:  # once in each of verl's reward workers
        _failed.add(rule)
        why = printable(verdict.error or str(ground_truth))  # it may quote the response
        _log.error("the rule %s failed, which counts as a wrong answer here:\n%s", rule, why)
    paid = correct if is_correct else wrong
    score = paid if verdict.score is None or verdict.kind == "crashed" else verdict.score
    return {"score": score, "acc": float(is_correct), "pred": verdict.extracted or ""}


def _policys_text(solution: str, extra_info: Mapping[str, Any]) -> str:
    """Return the text to grade: what the policy wrote last."""
    if LAST_MESSAGE in extra_info:
        return str(extra_info[LAST_MESSAGE])
    turns = extra_info.get("num_turns")  # the prompt and one answer are 2
    if turns is not None and int(turns) > 2:
        raise ValueError(
            f"trimtab: a conversation of {turns} turns cannot be graded, because verl passes on its text with the "
            f"replies of tools in it: set {AGENT_LOOP_KEY}={AGENT_LOOP}, or add `agent_name` {AGENT_LOOP!r} to the data"
        )
    return solution
