"""The metrics of a step, each named `area/name`, and the table of their meanings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor

from trimtab.data import Sample, by_rollout
from trimtab.grading import VERDICT_KINDS
from trimtab.objectives import METRICS as OBJECTIVE_METRICS
from trimtab.objectives import (
    TokenBatch,
    effective_sample_share,
    gradient_norm_squared,
    largest,
    quantile,
    ratio_sums,
    share_count,
    spurious,
)
from trimtab.text import percent
from trimtab.trainer.config import TASK_TERM, RewardConfig
from trimtab.trainer.model import Transcript, UpdateResult
from trimtab.trainer.train.agents import AGENT_METRICS
from trimtab.trainer.train.conversations import CONVERSATION_METRICS, conversation_metrics
from trimtab.trainer.train.gates import has_reward_spread
from trimtab.trainer.train.partial_rollouts import lag_metrics
from trimtab.trainer.train.reporting import SampleText
from trimtab.trainer.train.rollouts import accuracy_by_source
from trimtab.trainer.train.scoring import Experience

MAX_NAMED = 20  # responses named in the record of a non-finite update
TOP_GRADIENT_SHARE, TOP_GRADIENT_TOKENS = 0.001, 10  # the top tokens by gradient norm: this share, at least so many
NGRAM = 4  # tokens per n-gram of the repetition metric
_ODD = 0x5851F42D4C957F2D  # the multiplier of Knuth's 64-bit LCG: hashes n-grams well modulo 2^64

METRICS: dict[str, str] = {
    "curriculum/admitted_share": "share of the sampled groups that all gates admitted; this and all metrics of this "
    "area only with a `[curriculum]`",
    "curriculum/pool_easy": "number of problems whose latest group had a mean reward of curriculum.min_easy or more",
    "curriculum/pool_hard": "number of problems whose latest group had a mean reward of at most curriculum.max_hard",
    "curriculum/pool_normal": "number of problems between hard and easy",
    "curriculum/pool_solved": "number of problems whose latest group had a mean reward of curriculum.min_solved or "
    "more",
    "curriculum/pool_unseen": "number of problems that were not sampled yet",
    "curriculum/refused_mean_reward": "groups refused because their mean reward is not in the range; a gate of your "
    "own is counted as `curriculum/refused_NAME`; a group counts for the first gate that refuses it",
    "curriculum/refused_mixed": "groups refused because all their rewards are equal",
    "curriculum/sampled": "groups sampled for the step: trained on, refused, or more than were needed",
    "curriculum/still_solved_share": "share of the groups of solved problems that were solved again; below 1 something "
    "is forgotten",
    "eval/accuracy": "share of graded held-out problems answered correctly with greedy decoding; if the data has "
    "several sources, also `eval/accuracy/SOURCE` for each",
    "eval/crashed_share": "share of held-out problems on which the grader failed; logged only if it failed",
    "eval/problems": "number of held-out problems; logged only if there are fewer than run.eval_problems",
    "eval/score": "mean score on held-out problems, if the task's rule returns numbers",
    "eval/seen_share": "share of the held-out problems whose prompts are also trained on; logged only if there are any",
    "groups/dropped": "groups that dynamic sampling or another gate refused",
    "groups/mixed_share": "share of groups whose rewards differ; in all other groups the advantages are zero",
    "lag/max": "maximum over tokens of how many steps older than the present weights those are that sampled it; this "
    "and all metrics of this area only with rollout.max_lag",
    "lag/mean": "mean over tokens of how many steps older than the present weights those are that sampled it",
    "lag/spans_mean": "mean number of weight versions that sampled a response",
    "lag/unfinished": "number of responses that later steps begin or go on with",
    "lag/waiting": "number of groups that are finished and wait for a later step",
    "memory/gpu_peak_gb": "most memory that tensors have taken on the GPU so far, in GB; logged on a GPU",
    "policy/entropy": "mean entropy over the step's response tokens, before the first update (nats); with "
    "rollout.exact_truncation it and all other entropies are those of the distribution over the tokens that top-p and "
    "top-k kept",
    "policy/entropy_median": "median entropy over the tokens",
    "policy/entropy_p90": "90th percentile of the entropy over the tokens",
    "response/length_mean": "mean number of tokens per response",
    "response/repetition_share": "share of 4-grams that already occurred in the same response",
    "response/truncated_share": "share of responses truncated at rollout.max_new_tokens",
    "reward/accuracy": "share of the responses trained on that the grader found correct; if the data has several "
    "sources, also `reward/accuracy/SOURCE` for each",
    "reward/ambiguous_share": "share of sampled responses that give several answers although one is asked for",
    "reward/crashed_share": "share of sampled responses on which a rule failed",
    "reward/excluded": "number of responses excluded from training, including a single response left in its group",
    "reward/flipped_share": "share of the responses trained on whose verdict was flipped by `reward.noise`",
    "reward/mean": "mean reward of the responses trained on",
    "reward/no_answer_share": "share of sampled responses without an answer",
    "reward/score": "mean score of the responses trained on, if the task's rule returns numbers",
    "reward/too_costly_share": "share of sampled responses whose answer took too long to check",
    "sampler/effective_sample_share": "effective sample size of the ratios trainer / sampler as a share of the "
    "tokens, (sum w)^2 / (n sum w^2), before the first update: 1 if all ratios are equal, small if a few tokens hold "
    "most of the weight; with rollout.max_lag, older weights have sampled some of them",
    "sampler/kept_mean": "mean number of tokens that top-p and top-k kept; logged only with rollout.exact_truncation",
    "sampler/mismatch_max": "maximum over tokens of |log-prob of the sampler - log-prob of the trainer|",
    "sampler/mismatch_mean": "mean over tokens of |log-prob of the sampler - log-prob of the trainer|",
    "time/checkpoint": "seconds spent on writing checkpoints since the step before",
    "time/evaluation": "seconds spent on held-out problems",
    "time/grading": "seconds spent on grading, as part of time/rollout",
    "time/rollout": "seconds spent on sampling, grading and scoring",
    "time/sampling": "seconds spent on sampling, without waiting for tools or agents, as part of time/rollout",
    "time/scoring": "seconds spent on scoring, as part of time/rollout",
    "time/update": "seconds spent on planning and updating",
    "time/warm_start": "seconds spent on the warm start; logged once, at step 0 or 1",
    "time/tokens_per_second": "response tokens of the step divided by the seconds of the whole step",
    "tokens/count": "number of response tokens of the step",
    "tokens/spurious_share": "share of tokens with a positive advantage whose surprisal is 3 nats above the entropy",
    "tokens/top_gradient_share": "share of all gradient norms held by the top 0.1 % of tokens (at least 10 tokens)",
    "trim/gain": "slope of update/entropy_change against the running mean of trim/predicted_change",
    "trim/r2": "squared correlation of the two, over the last 100 measurements; logged from 20 on",
    "update/effective_sample_share_min": "effective sample size of the ratios new / old as a share of the tokens, as "
    "above, in the update of the step with the smallest one; 1 in the first update, before which nothing has moved",
    "update/entropy_change": "change of the mean entropy of the step's own tokens by its updates; logged every "
    "update.measure_every steps",
    "update/grad_norm": "gradient norm before clipping",
    "update/loss": "loss of the objective",
    "update/loss_scale": "factor on the loss in the backward pass, mean over the updates; logged only with "
    "model.precision = fp16",
    "update/overflows": "how often an update was computed again with half the loss scale, because a gradient was too "
    "large for fp16; logged only with model.precision = fp16",
    "update/lr": "learning rate of the step; logged only with a warm-up or a schedule",
    "update/skipped": "number of updates that were skipped because of a NaN or infinity",
    **AGENT_METRICS,
    **CONVERSATION_METRICS,
    **OBJECTIVE_METRICS,
}


# What a run spends its time on, in words. `time/rollout` is a sum of others.
TIMES = {
    "time/warm_start": "warm start",
    "time/sampling": "sampling",
    "time/tools": "waiting for tools",
    "time/agents": "waiting for agents",
    "time/grading": "grading",
    "time/scoring": "scoring",
    "time/update": "updates",
    "time/evaluation": "evaluation",
    "time/checkpoint": "checkpoints",
}
STEP_TIMES = ("time/rollout", "time/update")
SLOW_GRADING = 0.5  # share of the time of a step from which on there is advice
SLOW_GRADING_SECONDS = 0.5  # of a step; less is not worth advice


@dataclass(frozen=True)
class StepResult:
    """The metrics of a step, a record for each of its updates that was not finite, and some of its responses."""

    metrics: dict[str, float]
    nonfinite: list[dict[str, Any]] = field(default_factory=list)
    samples: Sequence[SampleText] = ()


def step_metrics(
    experience: Experience, results: Sequence[UpdateResult], config: RewardConfig | None = None
) -> dict[str, float]:
    """Return the metrics of a step; those of its updates are averaged (`_max`, `_min`: the extreme)."""
    rollouts, batch = experience.rollouts, experience.batch
    metrics: dict[str, float] = {"groups/dropped": rollouts.dropped_groups, "tokens/count": batch.tokens}
    metrics |= rollouts.curriculum
    if experience.lags is not None:
        metrics |= {**rollouts.lag, **lag_metrics([each.response for each in rollouts.responses], experience.lags)}
    metrics |= _token_metrics(experience) | _response_metrics(rollouts.responses, config or RewardConfig())
    metrics |= _kept_metrics(experience.transcripts)
    metrics |= _verdict_shares([*rollouts.responses, *rollouts.excluded])
    metrics |= _conversation_metrics([*rollouts.responses, *rollouts.excluded])
    metrics["reward/excluded"] = len(by_rollout(rollouts.excluded))
    if rollouts.noisy and rollouts.responses:
        metrics["reward/flipped_share"] = fmean(branches[0].flipped for branches in by_rollout(rollouts.responses))
    metrics["update/skipped"] = sum(not result.taken for result in results)
    if any("update/loss_scale" in result.metrics for result in results):
        metrics["update/overflows"] = sum(result.overflows for result in results)
    taken = [result.metrics for result in results if result.taken]
    # A dict instead of a set keeps the order of the names, so that logs of equal runs are equal.
    for name in {name: None for update in taken for name in update}:
        values = [update[name] for update in taken if name in update]
        combine = max if name.endswith("_max") else min if name.endswith("_min") else fmean
        metrics[name] = combine(values)
    return metrics


def _token_metrics(experience: Experience) -> dict[str, float]:
    batch = experience.batch
    if not batch.tokens:
        return {}
    assert batch.entropy is not None and batch.sampler_logp is not None
    values = {"policy/entropy": batch.entropy.mean()}
    mismatch = (batch.sampler_logp - batch.old_logp).abs()
    if experience.lags is not None:  # older weights differ for another reason
        mismatch = mismatch[torch.from_numpy(experience.lags == 0).to(mismatch.device)]
    if len(mismatch):
        values |= {"sampler/mismatch_mean": mismatch.mean(), "sampler/mismatch_max": mismatch.max()}
    values |= token_signals(batch)
    ratios = ratio_sums(batch.judged_logp, batch.sampler_logp)
    # One copy for all of them: each copy from a GPU waits for it.
    *numbers, total, squares = torch.stack([value.double() for value in (*values.values(), *ratios)]).tolist()
    share = effective_sample_share(total, squares, batch.tokens)
    return dict(zip(values, numbers, strict=True)) | {"sampler/effective_sample_share": share}


def _kept_metrics(transcripts: Sequence[Transcript]) -> dict[str, float]:
    kept = [transcript.kept for transcript in transcripts if transcript.kept is not None]
    rows = sum(map(len, kept))
    return {"sampler/kept_mean": sum(int(each.counts.sum()) for each in kept) / rows} if rows else {}


def _response_metrics(responses: Sequence[Sample], config: RewardConfig) -> dict[str, float]:
    if not responses:
        return {}
    groups: dict[int, list[Sample]] = {}
    for response in responses:
        groups.setdefault(response.group, []).append(response)
    # A rollout of many branches counts once. It is graded as one, but its branches may have rewards of their own.
    rollouts = by_rollout(responses)
    graded = [branches[0] for branches in rollouts]
    right = [each.verdict.kind == "correct" for each in graded]
    return {
        **accuracy_by_source("reward/accuracy", [each.problem.source for each in graded], right),
        "reward/mean": fmean(fmean(r.reward for r in branches) for branches in rollouts),
        "reward/accuracy": fmean(right),
        "response/length_mean": fmean(r.response.num_sampled for r in responses),
        "response/truncated_share": fmean(not r.response.finished for r in responses),
        "groups/mixed_share": fmean(map(has_reward_spread, groups.values())),
        **_graded_metrics(graded),
        **term_metrics(list(groups.values()), config),
    }


def _conversation_metrics(responses: Sequence[Sample]) -> dict[str, float]:
    held = [response for response in responses if response.conversation is not None and response.branch is None]
    conversations = [response.conversation for response in held if response.conversation is not None]
    return conversation_metrics(conversations, [response.has_void_turn for response in held])


def _graded_metrics(responses: Sequence[Sample]) -> dict[str, float]:
    graded = any(r.verdict.score is not None for r in responses)
    return {"reward/score": fmean(r.verdict.value for r in responses)} if graded else {}


def term_metrics(groups: Sequence[Sequence[Sample]], config: RewardConfig) -> dict[str, float]:
    """Return for each of several rewards its mean before its weight, and how much it differs within groups."""
    metrics: dict[str, float] = {}
    for name in [TASK_TERM, *config.terms] if config.terms else []:
        weight = config.weight if name == TASK_TERM else config.terms[name].weight
        values = [[fmean(r.terms[name] for r in branches) for branches in by_rollout(group)] for group in groups]
        metrics[f"rewards/{name}"] = fmean(value for group in values for value in group)
        metrics[f"rewards/{name}_spread"] = fmean(pstdev(weight * value for value in group) for group in values)
    return metrics


def describe_metric(name: str) -> str:
    """Return what a metric means; those of several rewards carry the names that the recipe gives them."""
    if name.startswith("curriculum/refused_") and name not in METRICS:
        return "groups that this gate refused"
    if not name.startswith("rewards/"):
        return METRICS.get(name, "")
    if name.endswith("_spread"):
        return "standard deviation of weight times reward within a group, mean over groups: its share of the signal"
    return "mean of this reward over the responses trained on, before its weight is applied"


def _verdict_shares(responses: Sequence[Sample]) -> dict[str, float]:
    """Return the share of each kind of verdict that is neither correct nor wrong."""
    # A response on which the rule of a term failed is no better than one on which the task's did.
    graded = [branches[0] for branches in by_rollout(responses)]
    kinds = ["crashed" if response.failed else response.verdict.kind for response in graded]
    others = [kind for kind in VERDICT_KINDS if kind not in ("correct", "wrong")]
    return {f"reward/{kind}_share": kinds.count(kind) / len(kinds) for kind in others} if kinds else {}


def nonfinite_records(step: int, experience: Experience, results: Sequence[UpdateResult]) -> list[dict[str, Any]]:
    """Return a record for every skipped update: which value was not finite, and in which responses."""
    records = []
    sizes = experience.rollouts.minibatch_sizes if experience.nonfinite is None else [0]
    starts = list(accumulate(sizes, initial=0))[:-1]  # of the mini-batches, the same in every pass
    for update, result in enumerate(results):
        if not result.taken:
            first = starts[update % len(starts)]
            found = [experience.rollouts.responses[first + row] for row in result.nonfinite_responses]
            named = [_named(response) for response in found[:MAX_NAMED]]
            value, count = result.nonfinite, len(found)
            records.append({"step": step, "update": update, "value": value, "count": count, "responses": named})
    return records


def _named(response: Sample) -> dict[str, Any]:
    branch = {} if response.branch is None else {"branch": response.branch}
    return {"prompt": response.group, "sample": response.response.sample, **branch, "text": response.text[:200]}


def token_signals(batch: TokenBatch) -> dict[str, Tensor]:
    """Return the warning signs of a scored step as 0-d tensors, by metric name; without tokens there are none."""
    if not batch.tokens:
        return {}
    assert batch.entropy is not None
    signals = {
        "policy/entropy_median": quantile(batch.entropy, 0.5),
        "policy/entropy_p90": quantile(batch.entropy, 0.9),
        "tokens/spurious_share": spurious(batch).float().mean(),
    }
    # Without any advantage all norms are 0, and the share is undefined.
    if batch.sum_p2 is not None and bool((batch.advantage != 0).any()):
        signals["tokens/top_gradient_share"] = top_gradient_share(batch)
    if batch.token is not None:
        signals["response/repetition_share"] = repetition_share(batch.token, batch.sequence)
    return signals


def top_gradient_share(batch: TokenBatch) -> Tensor:
    """Return the share of all gradient norms that the largest ones hold; exact for unclipped on-policy tokens."""
    assert batch.sum_p2 is not None
    norm = gradient_norm_squared(batch.old_logp, batch.sum_p2, batch.advantage).sqrt()
    count = min(batch.tokens, max(TOP_GRADIENT_TOKENS, share_count(batch.tokens, TOP_GRADIENT_SHARE)))
    return norm[largest(norm, count)].sum() / norm.sum().clamp(min=torch.finfo(norm.dtype).tiny)


def repetition_share(token: Tensor, sequence: Tensor) -> Tensor:
    """Return the share of n-grams that occurred earlier in the same response; 0 if all responses are shorter."""
    count = len(token) - NGRAM + 1
    if count < 1:
        return torch.zeros((), device=token.device)
    # Hash every n-gram together with its response, and count equal neighbours after sorting.
    code = sequence[:count].to(torch.int64) * _ODD
    for offset in range(NGRAM):
        code = (code + token[offset : offset + count]) * _ODD
    # Drop n-grams that reach over the end of a response.
    code = code[sequence[:count] == sequence[NGRAM - 1 :]].sort().values
    return (code[1:] == code[:-1]).sum(dtype=torch.float32) / max(len(code), 1)


@dataclass(frozen=True)
class BestEvaluation:
    """The evaluation with the best held-out score, and how many came after it; of equal ones the first."""

    step: int
    score: float
    later: int = 0


def best_evaluation(
    records: Iterable[Mapping[str, float]], best: BestEvaluation | None = None
) -> BestEvaluation | None:
    """Return the best of some steps' evaluations and an earlier best: by the mean score, else by the accuracy."""
    for record in records:
        score = record.get("eval/score", record.get("eval/accuracy"))
        if score is None or not math.isfinite(score):
            continue
        if best is None or score > best.score:
            best = BestEvaluation(int(record["step"]), score)
        else:
            best = replace(best, later=best.later + 1)
    return best


def has_learning_signal(metrics: Mapping[str, float]) -> bool:
    """Return whether a step could teach anything: rewards differ within some group, and an update was taken."""
    return metrics.get("groups/mixed_share", 0.0) > 0 and "update/loss" in metrics


def time_words(records: Sequence[Mapping[str, float]]) -> str:
    """Say how the time of some steps divides: `updates 61.0%, sampling 30.2%, grading 8.8%`; "" without any."""
    totals = {word: sum(record.get(name, 0.0) for record in records) for name, word in TIMES.items()}
    spent = {word: seconds for word, seconds in totals.items() if seconds > 0}
    ordered = sorted(spent, key=lambda word: -spent[word])
    return ", ".join(f"{word} {percent(spent[word] / sum(spent.values()))}" for word in ordered)


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Return the most memory that this process has taken on its GPU so far; nothing on another device."""
    if device.type != "cuda":
        return {}
    return {"memory/gpu_peak_gb": torch.cuda.max_memory_allocated(device) / 1e9}


def has_slow_grading(metrics: Mapping[str, float]) -> bool:
    """Return whether grading took most of a step."""
    grading = metrics.get("time/grading", 0.0)
    step = sum(metrics.get(name, 0.0) for name in STEP_TIMES)
    return grading >= SLOW_GRADING_SECONDS and grading > SLOW_GRADING * step


def slow_grading_advice(metrics: Mapping[str, float]) -> str:
    """Say how much of a step grading took, and what makes it faster."""
    step = sum(metrics[name] for name in STEP_TIMES)
    return (
        f"note: grading takes most of a step: {metrics['time/grading']:.1f} of {step:.1f} s. A Python rule is faster "
        "with @trimtab.rule(batched=True) or, if any text is safe for it, in_process=True; an HTTP rule with more "
        "concurrency; the built-in rules with more CPU cores, on which their workers run side by side; see "
        "docs/rewards.md"
    )


def no_signal_diagnosis(steps: int, metrics: Mapping[str, float], nonfinite: Path) -> str:
    """Explain why the last `steps` steps taught nothing, from the metrics of the last one."""
    accuracy, truncated = metrics.get("reward/accuracy", 0.0), metrics.get("response/truncated_share", 0.0)
    # From the most certain cause to the least: an update that was skipped explains everything else.
    if metrics["update/skipped"]:
        advice = f"no update was finite, see {nonfinite}: lower update.lr"
    elif "reward/score" in metrics or any(name.startswith("rewards/") for name in metrics):
        advice = f"all responses of a group get the same reward (mean {metrics['reward/mean']:.3g}): check the rules"
    elif accuracy < 0.5:
        advice = "no response is right: check the task's rule and prompt, use a warm start or an easier task"
    else:
        advice = "every response is right: use a harder task, or stop here"
    figures = f"accuracy {accuracy:.2f}, truncated {truncated:.2f}"
    return f"{steps} steps in a row without learning signal ({figures}): {advice}"
