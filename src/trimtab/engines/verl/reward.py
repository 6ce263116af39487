"""trimtab's graders as verl's reward function.

`reward.custom_reward_function.path=pkg://trimtab.engines.verl.reward`, with `rule`, `correct` and `wrong` under
`+reward.custom_reward_function.reward_kwargs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab.rewards import grade


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
    """The score of a response, and for verl's logs whether it is right and what was found in it."""
    verdict = grade(solution_str, str(ground_truth), rule, extra_info)
    right = verdict.kind == "correct"
    return {"score": correct if right else wrong, "acc": float(right), "pred": verdict.extracted or ""}
