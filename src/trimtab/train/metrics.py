"""The metrics of a step, each `area/name`, and the table that says what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch

from trimtab.objectives import METRICS as OBJECTIVE_METRICS
from trimtab.objectives import Objective
from trimtab.policy import UpdateResult
from trimtab.rewards import VERDICT_KINDS
from trimtab.train.experience import Experience, GradedResponse, has_spread, mismatch
from trimtab.train.token_signals import token_signs

NAMED = 20  # responses named in the record of a fault

METRICS: dict[str, str] = {
    "eval/accuracy": "share of held-out problems answered right, greedily",
    "groups/dropped": "groups that dynamic sampling left out for want of reward spread",
    "groups/mixed_share": "share of groups whose rewards differ: only they teach",
    "policy/entropy": "token-mean entropy of the old policy over the step's responses (nats)",
    "policy/entropy_median": "median of that entropy over the tokens",
    "policy/entropy_p90": "the entropy that one token in ten exceeds",
    "response/length_mean": "tokens per response",
    "response/repetition_share": "share of 4-grams that were in the same response before",
    "response/truncated_share": "share of responses cut off at max_new_tokens",
    "reward/accuracy": "share of the responses trained on that are right",
    "reward/ambiguous_share": "share of sampled responses with several answers where one is asked",
    "reward/crashed_share": "share of sampled responses on which the grader failed",
    "reward/left_out": "responses left out of training, and those that were left alone in their group",
    "reward/mean": "mean reward",
    "reward/no_answer_share": "share of sampled responses without an answer where the rule looks for it",
    "reward/too_costly_share": "share of sampled responses whose answer took too long to understand",
    "sampler/mismatch_max": "largest difference between the sampler's and the trainer's log-probability",
    "sampler/mismatch_mean": "mean of that difference",
    "time/rollout": "seconds of sampling, grading and scoring",
    "time/update": "seconds of planning and updating",
    "time/tokens_per_second": "response tokens per second of the whole step",
    "tokens/count": "response tokens of the step",
    "tokens/spurious_share": "share of tokens that are rewarded though 3 nats more surprising than they should be",
    "tokens/top_gradient_share": "share of all gradient norms that the top 0.1 % of tokens hold (at least 10 tokens)",
    "update/grad_norm": "gradient norm before clipping",
    "update/loss": "the objective",
    "update/skipped": "updates of the step that were not taken because something was not finite",
    **OBJECTIVE_METRICS,
}


def step_metrics(experience: Experience, results: Sequence[UpdateResult], objective: Objective) -> dict[str, float]:
    """What happened in a step, averaged over its updates."""
    answers, batch = experience.answers, experience.batch
    metrics: dict[str, float] = {"groups/dropped": experience.dropped_groups, "tokens/count": batch.tokens}
    if batch.tokens:
        off = mismatch(batch)
        assert batch.entropy is not None
        numbers = {"policy/entropy": batch.entropy.mean(), "sampler/mismatch_mean": off.mean()}
        numbers |= {"sampler/mismatch_max": off.max(), **token_signs(batch)}
        metrics |= dict(zip(numbers, torch.stack(list(numbers.values())).tolist(), strict=True))
    if answers:
        metrics |= {
            "reward/mean": fmean(a.reward for a in answers),
            "reward/accuracy": fmean(a.verdict.kind == "correct" for a in answers),
            "response/length_mean": fmean(len(a.response.tokens) for a in answers),
            "response/truncated_share": fmean(not a.response.finished for a in answers),
            "groups/mixed_share": fmean(has_spread(group) for group in by_group(answers)),
        }
    metrics |= _verdict_shares([*answers, *experience.left_out])
    metrics["reward/left_out"] = len(experience.left_out)
    metrics["update/skipped"] = sum(not result.taken for result in results)
    names = {name: None for result in results if result.taken for name in result.metrics}
    for name in names:
        values = [result.metrics[name] for result in results if result.taken and name in result.metrics]
        metrics[name] = (
            max(values) if name.endswith("_max") else min(values) if name.endswith("_min") else fmean(values)
        )
    return metrics


def _verdict_shares(answers: Sequence[GradedResponse]) -> dict[str, float]:
    """How often each kind of verdict was given that is neither right nor wrong."""
    kinds = [answer.verdict.kind for answer in answers]
    others = [kind for kind in VERDICT_KINDS if kind not in ("correct", "wrong")]
    return {f"reward/{kind}_share": kinds.count(kind) / len(kinds) for kind in others} if kinds else {}


def fault_records(step: int, experience: Experience, results: Sequence[UpdateResult]) -> list[dict[str, Any]]:
    """For every update that was not taken: what was not finite, and in which responses (the first few of them)."""
    records, first = [], 0
    for update, result in enumerate(results):
        blamed = [experience.answers[first + row] for row in result.nonfinite_responses]
        if not result.taken:
            named = [{"prompt": a.group, "sample": a.response.sample, "text": a.text[:200]} for a in blamed[:NAMED]]
            record = {
                "step": step,
                "update": update,
                "fault": result.nonfinite,
                "count": len(blamed),
                "responses": named,
            }
            records.append(record)
        first += experience.sizes[update] if experience.sizes else 0
    return records


def by_group(answers: Sequence[GradedResponse]) -> list[list[GradedResponse]]:
    """The answers to each prompt."""
    groups: dict[int, list[GradedResponse]] = {}
    for answer in answers:
        groups.setdefault(answer.group, []).append(answer)
    return list(groups.values())
