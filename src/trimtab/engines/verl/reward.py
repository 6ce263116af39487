"""trimtab's grading rules as a reward function for verl.

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
    """Grade a response: its score and, for verl's logs, whether it is correct and the extracted answer."""
    verdict = grade(solution_str, str(ground_truth), rule, extra_info)
    is_correct = verdict.kind == "correct"
    return {"score": correct if is_correct else wrong, "acc": float(is_correct), "pred": verdict.extracted or ""}
