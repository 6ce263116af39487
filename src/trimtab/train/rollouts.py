"""Sample responses and grade them: the rollouts of a training step, and greedy evaluation on held-out problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import fmean

import numpy as np

from trimtab.config import TASK_TERM, Config, RewardConfig
from trimtab.policy import LongPromptError, Policy, Transcript
from trimtab.rewards import Submission, Verdict, VerdictKind, grade_submissions
from trimtab.rollout import PromptTokens, Response, SamplingOptions, rng_keys, uniform
from trimtab.tasks import Problem, Task, problem_index
from trimtab.text import printable, shorten
from trimtab.train.reporting import SampleText
from trimtab.train.trainer import RunProgress, Trainer

PROBLEMS_CHECKED, PROMPTS_CHECKED = 1000, 16  # before the first step
# Where a grader compares an answer it may err; without an answer, or without a verdict, there is nothing to flip.
OPPOSITE: dict[VerdictKind, VerdictKind] = {"correct": "wrong", "wrong": "correct"}
MOST_SOURCES = 20  # data sources with an accuracy of their own, the most frequent
SAMPLES_LOGGED = 4  # responses of a step that loggers get


@dataclass(frozen=True)
class Reward:
    """The reward of a response; `value` is None if it is excluded from training.

    `terms` has each reward by itself and before its weight, by name, where there are several.
    """

    value: float | None
    terms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GradedResponse:
    """A sampled response with its verdict and reward; `group` is its prompt's number in the stream of prompts.

    An `excluded` response is not trained on, and its reward means nothing. A `flipped` one has the reward of the
    opposite verdict (`reward.noise`); `verdict` is always the grader's own. `terms` has each of several rewards by
    name, before its weight. `failed`: the task's rule or that of a term has crashed.
    """

    problem: Problem
    prompt: Sequence[int]
    response: Response
    text: str
    verdict: Verdict
    reward: float
    group: int
    excluded: bool = False
    flipped: bool = False
    terms: Mapping[str, float] = field(default_factory=dict)
    failed: bool = False

    @cached_property
    def transcript(self) -> Transcript:
        """The token ids of prompt and response."""
        return Transcript(self.prompt, self.response.tokens, self.response.observed)


Group = list[GradedResponse]  # the responses to one prompt


@dataclass(frozen=True)
class Rollouts:
    """The graded responses of a step, in the order of training and split into mini-batches.

    `position` is where the next step starts in the stream of prompts. `noisy`: `reward.noise` is on.
    """

    responses: list[GradedResponse]
    minibatch_sizes: list[int]
    position: int = 0
    dropped_groups: int = 0
    excluded: Sequence[GradedResponse] = ()
    noisy: bool = False


def collect_rollouts(trainer: Trainer, progress: RunProgress) -> Rollouts:
    """Sample and grade the responses of the next step, and split them into mini-batches."""
    groups, dropped, position = sample_groups(trainer, progress)
    groups, excluded = remove_excluded(groups)
    responses, sizes = split_into_minibatches(groups, trainer.config.update.per_step)
    return Rollouts(responses, sizes, position, dropped, excluded, noisy=trainer.config.reward.noise > 0)


def sample_groups(trainer: Trainer, progress: RunProgress) -> tuple[list[Group], int, int]:
    """Sample the groups of a step; return them, the number of groups dropped, and the next position in the stream.

    With dynamic sampling only groups whose rewards differ are kept, and further prompts are sampled in their place.
    """
    config, rollout, position = trainer.config, trainer.config.rollout, progress.position
    options = config.sampling_options(rollout.samples)
    groups: list[Group] = []
    dropped = 0
    for _ in range(rollout.dynamic_max_rounds if rollout.dynamic_sampling else 1):
        missing = rollout.prompts - len(groups)
        count = int(missing * rollout.dynamic_oversample) if rollout.dynamic_sampling else missing
        # A prompt's number in the stream seeds its samples, so results do not depend on the round it came in.
        numbers = range(position, position + count)
        problems = [(n, trainer.task[problem_index(len(trainer.task), config.run.seed, n)]) for n in numbers]
        sampled = sample_and_grade(trainer, problems, progress.step, options, True)
        useful = list(filter(has_reward_spread, sampled)) if rollout.dynamic_sampling else sampled
        dropped += len(sampled) - len(useful)
        used = useful[:missing]
        groups += used
        # Prompts after the last group that is used are sampled again by the next step: none is skipped.
        position = used[-1][0].group + 1 if len(used) == missing else position + count
        if len(groups) == rollout.prompts:
            break
    return groups, dropped, position


def sample_and_grade(
    trainer: Trainer,
    problems: Sequence[tuple[int, Problem]],
    step: int,
    options: SamplingOptions,
    training: bool = False,
) -> list[Group]:
    """Sample responses to numbered problems and grade them; return one group per problem.

    In training there are also the rewards of `reward.terms`, and `reward.noise` flips some verdicts.
    """
    config, policy = trainer.config, trainer.policy
    prompts = encode_prompts(policy, problems, config.rollout.max_prompt_tokens, config.rollout.max_new_tokens)
    sampled = trainer.sampler.sample(prompts, step, options)
    texts = policy.decode_batch([response.tokens for responses in sampled for response in responses])
    pairs = [
        (problem, response) for (_, problem), responses in zip(problems, sampled, strict=True) for response in responses
    ]
    items = [
        Submission.of(text, problem, len(response.tokens), response.finished)
        for text, (problem, response) in zip(texts, pairs, strict=True)
    ]
    # One call for all responses: the graders work on the list in parallel.
    rules, noise = [problem.rule for problem, _ in pairs], config.reward.noise if training else 0.0
    verdicts = grade_submissions(items, rules)
    if noise:
        refuse_noisy_numbers(rules, verdicts)
    terms = grade_terms(items, config.reward) if training else [{} for _ in items]
    _note_errors(trainer, pairs, items, verdicts, terms)
    graded = iter(zip(texts, verdicts, terms, strict=True))
    flips = choose_flips([number for number, _ in problems], step, options, noise)
    groups = []
    for (number, problem), prompt, responses, flip in zip(problems, prompts, sampled, flips, strict=True):
        group = []
        for response in responses:
            text, verdict, found = next(graded)
            rewarded = flipped_verdict(verdict) if flip[response.sample] else verdict
            flipped = rewarded != verdict
            reward = combined_reward(rewarded, found, response, config.reward, config.rollout.max_new_tokens)
            failed = any(each.kind == "crashed" for each in (verdict, *found.values()))
            group.append(
                GradedResponse(
                    problem, prompt.ids, response, text, verdict, reward.value or 0.0, number, reward.value is None,
                    flipped, reward.terms, failed,
                )
            )  # fmt: skip
        groups.append(group)
    return groups


def _note_errors(
    trainer: Trainer,
    pairs: Sequence[tuple[Problem, Response]],
    items: Sequence[Submission],
    verdicts: Sequence[Verdict],
    terms: Sequence[Mapping[str, Verdict]],
) -> None:
    for (problem, _), item, verdict, found in zip(pairs, items, verdicts, terms, strict=True):
        trainer.rule_errors.add(problem.rule, verdict, item)
        for name, each in found.items():
            trainer.rule_errors.add(trainer.config.reward.terms[name].rule, each, item)


def choose_flips(numbers: Sequence[int], step: int, options: SamplingOptions, noise: float) -> list[list[bool]]:
    """Return for every prompt number and sample whether its verdict is to be flipped, with probability `noise`."""
    # The sampler's random numbers are those of positions from 0 on, so -1 is independent of what is sampled.
    values = uniform(rng_keys(options.seed, step, numbers, options.samples), -1)
    flips: list[list[bool]] = (values < noise).view(len(numbers), options.samples).tolist()
    return flips


def encode_prompts(
    policy: Policy, problems: Sequence[tuple[int, Problem]], limit: int, max_new_tokens: int = 0
) -> list[PromptTokens]:
    """Tokenize the prompts of numbered problems; one of more than `limit` tokens is an error.

    So is one that leaves no room for `max_new_tokens` within the positions that the model knows.
    """
    advice = "raise it, or remove such problems"
    try:
        encoded = policy.encode_batch([problem.prompt for _, problem in problems], limit)
    except LongPromptError as error:
        problem = problems[error.number][1]
        raise ValueError(f"{_named(problem)}: {error}; rollout.max_prompt_tokens={limit} ({advice})") from None
    prompts = [PromptTokens(ids, number) for ids, (number, _) in zip(encoded, problems, strict=True)]
    for (_, problem), prompt in zip(problems, prompts, strict=True):
        if not 0 < len(prompt.ids) <= limit:
            raise ValueError(
                f"{_named(problem)} has {len(prompt.ids)} tokens; rollout.max_prompt_tokens={limit} ({advice})"
            )
        if len(prompt.ids) + max_new_tokens > policy.context:
            raise ValueError(
                f"{_named(problem)} has {len(prompt.ids)} tokens: with rollout.max_new_tokens={max_new_tokens} that is "
                f"more than the model's {policy.context} positions; set rollout.max_new_tokens to "
                f"{max(policy.context - len(prompt.ids), 0)} or less, or remove such problems"
            )
    return prompts


def check_positions(policy: Policy, task: Task, config: Config) -> None:
    """Raise at the start of a run where a prompt and its response would exceed the model's positions."""
    rollout = config.rollout
    if rollout.max_prompt_tokens + rollout.max_new_tokens <= policy.context:
        return
    # The longest of some are tokenized: problems may be millions, or slow to make. Later ones are checked as they come.
    problems = [(number, task[number]) for number in range(min(len(task), PROBLEMS_CHECKED))]
    longest = sorted(problems, key=lambda each: -sum(len(message["content"]) for message in each[1].prompt))
    encode_prompts(policy, longest[:PROMPTS_CHECKED], rollout.max_prompt_tokens, rollout.max_new_tokens)


def _named(problem: Problem) -> str:
    """Return where a problem's prompt is, for an error."""
    start = problem.prompt[-1]["content"][:40]
    return (
        f"{problem.location}: the prompt {start!r}" if problem.location else f"a prompt of {problem.source}, {start!r},"
    )


def reward_of(verdict: Verdict, response: Response, config: RewardConfig, limit: int) -> float | None:
    """Return the reward by the task's rule with DAPO's soft overlong penalty; None if it is excluded from training."""
    reward = _paid(verdict, config)
    if reward is None:
        return None
    reward *= config.weight
    if config.overlong_buffer:
        over = response.num_sampled - (limit - config.overlong_buffer)
        reward += min(-over / config.overlong_buffer, 0.0) * config.overlong_factor
    return reward


def sample_texts(responses: Sequence[GradedResponse], count: int = SAMPLES_LOGGED) -> list[SampleText]:
    """Return some responses of a step as text, from short to long: evenly spaced in the order of training."""
    some = [responses[n * len(responses) // count] for n in range(min(count, len(responses)))]
    return [
        SampleText(
            prompt="\n".join(message["content"] for message in each.problem.prompt),
            response=each.text,
            answer=each.problem.answer,
            verdict=each.verdict.kind,
            reward=each.reward,
        )
        for each in some
    ]


def combined_reward(
    verdict: Verdict, terms: Mapping[str, Verdict], response: Response, config: RewardConfig, limit: int
) -> Reward:
    """Return the reward of a response from the verdict of the task's rule and those of `reward.terms`."""
    total, paid = reward_of(verdict, response, config, limit), _paid(verdict, config)
    values: dict[str, float] = {TASK_TERM: paid} if terms and paid is not None else {}
    for name, found in terms.items():
        term = config.terms[name]
        value = found.value if found.kind != "crashed" else None if term.crashed == "exclude" else float(term.crashed)
        if value is not None:
            values[name] = value
        total = None if total is None or value is None else total + term.weight * value
    if total is not None and (terms or verdict.score is not None):
        # Advantages are computed in float32. Sums that differ only beyond it, as 0.1 + 0.2 and 0.3, would make a group
        # look mixed, and its rounding errors would be normalised to advantages of 1.
        total = float(np.float32(total))
    return Reward(total, values)


def _paid(verdict: Verdict, config: RewardConfig) -> float | None:
    """Return what the task's rule pays, before its weight: its number, else what its kind is worth."""
    if verdict.score is not None and verdict.kind != "crashed":
        return verdict.score
    return config.of(verdict.kind)


def grade_terms(items: Sequence[Submission], config: RewardConfig) -> list[dict[str, Verdict]]:
    """Grade each response by the rules of `reward.terms`; return its verdicts by name."""
    columns = {name: grade_submissions(items, term.rule, term.options) for name, term in config.terms.items()}
    return [{name: column[row] for name, column in columns.items()} for row in range(len(items))]


def flipped_verdict(verdict: Verdict) -> Verdict:
    """Return the opposite verdict, for `reward.noise`."""
    return Verdict(OPPOSITE[verdict.kind]) if verdict.kind in OPPOSITE else verdict


def refuse_noisy_numbers(rules: Sequence[str], verdicts: Sequence[Verdict]) -> None:
    """Refuse `reward.noise` where a rule gives numbers."""
    for rule, verdict in zip(rules, verdicts, strict=True):
        if verdict.score is not None:
            raise ValueError(
                f"reward.noise rewards right answers as wrong ones and the reverse, but the rule {rule} returned "
                f"{verdict.score:g}, and a number has no opposite: set reward.noise = 0, or let it return True or False"
            )


def has_reward_spread(group: Sequence[GradedResponse]) -> bool:
    """Return whether the rewards of a group differ; if they do not, all its advantages are zero."""
    return len({response.reward for response in group if not response.excluded}) > 1


def remove_excluded(groups: list[Group]) -> tuple[list[Group], list[GradedResponse]]:
    """Split off the responses that are not trained on: return the remaining groups, and the excluded responses."""
    kept, excluded = [], []
    for group in groups:
        remaining = [response for response in group if not response.excluded]
        # A single remaining response has nothing to be compared with: its advantage would be zero.
        if len(remaining) < len(group) and len(remaining) < 2:
            remaining = []
        excluded += [response for response in group if response.excluded or not remaining]
        kept += [remaining] if remaining else []
    return kept, excluded


def split_into_minibatches(groups: list[Group], minibatches: int) -> tuple[list[GradedResponse], list[int]]:
    """Split groups into mini-batches of whole groups; return all responses in order, and the mini-batches' sizes."""
    responses, sizes = [], []
    # With groups dropped or excluded the mini-batches differ by up to one group, and some may be empty.
    bounds = [round(len(groups) * k / minibatches) for k in range(minibatches + 1)]
    for low, high in pairwise(bounds):
        minibatch = [response for group in groups[low:high] for response in group]
        # Micro-batches are cut in this order: neighbours of similar length leave little padding.
        responses += sorted(minibatch, key=lambda response: len(response.transcript))
        sizes.append(len(minibatch))
    return responses, [size for size in sizes if size]


def evaluate(trainer: Trainer) -> dict[str, float]:
    """Measure the greedy accuracy, and the mean of a rule's numbers, on held-out problems; without any, no metric."""
    test, config = trainer.test_task, trainer.config
    if test is None:
        return {}
    problems = [(n, test[n]) for n in range(min(len(test), config.run.eval_problems))]
    # No training step is numbered -1, so evaluation shares no random numbers with one.
    groups = sample_and_grade(trainer, problems, -1, config.sampling_options(samples=1, temperature=0.0))
    verdicts = [group[0].verdict for group in groups]
    right = [verdict.kind == "correct" for verdict in verdicts]
    metrics = {"eval/accuracy": fmean(right)}
    if any(verdict.score is not None for verdict in verdicts):
        metrics["eval/score"] = fmean(verdict.value for verdict in verdicts)
    if any(verdict.kind == "crashed" for verdict in verdicts):
        metrics["eval/crashed_share"] = fmean(verdict.kind == "crashed" for verdict in verdicts)
    if len(problems) < config.run.eval_problems:
        metrics["eval/problems"] = len(problems)
    sources = [problem.source for _, problem in problems]
    return metrics | accuracy_by_source("eval/accuracy", sources, right)


def accuracy_by_source(prefix: str, sources: Sequence[str], right: Sequence[bool]) -> dict[str, float]:
    """Return the share of right answers for each of several data sources; nothing where there is but one."""
    counts = Counter(sources)
    if len(counts) < 2:
        return {}
    shown = [source for source, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:MOST_SOURCES]]
    shares = {s: fmean(r for source, r in zip(sources, right, strict=True) if source == s) for s in shown}
    # A source is a text of the data's: it must not look like another metric, or be endless.
    return {f"{prefix}/{shorten(printable(s).replace('/', '_'), 60)}": share for s, share in shares.items()}
