"""Sample responses and grade them: the rollouts of a training step, and greedy evaluation on held-out problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

from trimtab.data import Group, Problem, Response, Sample, SamplingOptions, by_rollout, stream_index
from trimtab.grading import RuleErrors, Verdict
from trimtab.text import one_line, shorten
from trimtab.trainer.train.agents import agent_evaluation_metrics
from trimtab.trainer.train.conversations import (
    as_samples,
    conversation_text,
    evaluation_metrics,
    sample_responses,
    set_verdicts,
)
from trimtab.trainer.train.gates import build_gates, mean_reward, refused_by
from trimtab.trainer.train.partial_rollouts import PartialGroup, finish_groups
from trimtab.trainer.train.prompts import encode_prompts
from trimtab.trainer.train.reporting import SampleText
from trimtab.trainer.train.rewards import choose_flips, grade_terms, refuse_noisy_numbers, set_reward
from trimtab.trainer.train.trainer import RunProgress, Trainer

MOST_SOURCES = 20  # data sources with an accuracy of their own, the most frequent
SAMPLES_LOGGED = 4  # responses of a step that loggers get


@dataclass(frozen=True)
class Rollouts:
    """The samples of a step, in the order of training and split into mini-batches.

    `position` is where the next step starts in the stream of prompts. `noisy`: `reward.noise` is on. `curriculum` has
    the metrics of the recipe's curriculum, if it has one, and `lag` those of partial rollouts. `step` is how many steps
    the policy has been trained for.
    """

    responses: list[Sample]
    minibatch_sizes: list[int]
    position: int = 0
    dropped_groups: int = 0
    excluded: Sequence[Sample] = ()
    noisy: bool = False
    curriculum: Mapping[str, float] = field(default_factory=dict)
    lag: Mapping[str, float] = field(default_factory=dict)
    step: int = 0


@dataclass
class SampledGroups:
    """The groups of a step, how many were sampled for them, how many each gate refused, and the next position."""

    position: int
    admitted: list[Group] = field(default_factory=list)
    sampled: int = 0
    refused: Counter[str] = field(default_factory=Counter)


def collect_rollouts(trainer: Trainer, progress: RunProgress) -> Rollouts:
    """Sample and grade the responses of the next step, and split them into mini-batches."""
    trainer.seconds |= {"time/sampling": 0.0, "time/grading": 0.0}  # of a process without a problem of its own too
    found = sample_groups(trainer, progress)
    groups, excluded = remove_excluded(found.admitted)
    responses, sizes = split_into_minibatches(groups, trainer.config.update.per_step)
    return Rollouts(
        responses,
        sizes,
        found.position,
        found.refused.total(),
        excluded,
        noisy=trainer.config.reward.noise > 0,
        curriculum=curriculum_metrics(trainer, found),
        lag=partial_metrics(trainer),
        step=progress.step,
    )


def sample_groups(trainer: Trainer, progress: RunProgress) -> SampledGroups:
    """Sample the groups of a step; further prompts are sampled in place of groups that a gate refuses."""
    config, rollout = trainer.config, trainer.config.rollout
    options = config.sampling_options(rollout.samples)
    gates = build_gates(config)
    found = SampledGroups(progress.position)
    for _ in range(most_rounds(trainer)):
        missing = rollout.prompts - len(found.admitted)
        end, begun = found.position, None
        if trainer.partial is None:
            end += int(missing * rollout.dynamic_oversample) if gates else missing
            # A prompt's number seeds its samples, so results do not depend on the round it came in.
            numbers: Sequence[int] = range(found.position, end)
            chosen = choose_problems(trainer, range(found.position, end))
        else:
            taken, end = finish_partial_groups(trainer, found, progress.step, options)
            numbers, chosen = [each.number for each in taken], [each.problem for each in taken]
            begun = [each.responses for each in taken]
        problems = [(number, trainer.task[index]) for number, index in zip(numbers, chosen, strict=True)]
        sampled = sample_and_grade(trainer, problems, progress.step, options, True, begun)
        if trainer.curriculum is not None and trainer.world.leads:
            trainer.curriculum.observe(list(zip(chosen, map(mean_reward, sampled), strict=True)))
        # One rank decides: a gate of the user's own may have state.
        refused = [refused_by(group, gates) for group in sampled] if trainer.world.leads else []
        refused = trainer.world.from_leader(refused) if gates else [""] * len(sampled)
        used = [group for group, by in zip(sampled, refused, strict=True) if not by][:missing]
        found.admitted += used
        found.sampled += len(sampled)
        found.refused.update(filter(None, refused))
        # Prompts after the last group that is used are sampled again by the next step: none is skipped.
        again = trainer.partial is None and len(used) == missing
        found.position = used[-1][0].group + 1 if again else end
        if len(found.admitted) == rollout.prompts:
            break
    return found


def most_rounds(trainer: Trainer) -> int:
    """Return how often a step may sample prompts in place of groups that a gate refuses, the first time included."""
    rollout = trainer.config.rollout
    if not trainer.config.gates:
        return 1
    # Of partial rollouts a round takes no more groups than are missing: others are on their way already.
    oversample = 1.0 if trainer.partial is None else rollout.dynamic_oversample
    return int(rollout.dynamic_max_rounds * oversample)


def finish_partial_groups(
    trainer: Trainer, found: SampledGroups, step: int, options: SamplingOptions
) -> tuple[list[PartialGroup], int]:
    """Begin groups as far as there is room, and sample until as many as the step misses are finished.

    Return the oldest of these, and the position after the prompts that were begun.
    """
    partial, world, config = trainer.partial, trainer.world, trainer.config.rollout
    assert partial is not None
    missing = config.prompts - len(found.admitted)
    numbers = range(found.position, found.position + partial.room(len(found.admitted)))
    if numbers:
        partial.begin(numbers, choose_problems(trainer, numbers), step, options.samples)
    finished, unfinished = partial.split(options)
    count = missing - len(finished)
    if count > 0:
        # Dealt in turn: all ranks have as many groups, or one less, of every age, and finish as many, or one less.
        own, own_count = unfinished[world.rank :: world.size], len(range(world.rank, count, world.size))
        sampled = own if own_count else []
        problems = [(group.number, trainer.task[group.problem]) for group in sampled]
        prompts = encode_prompts(trainer.policy, problems, config.max_prompt_tokens, config.max_new_tokens)
        with trainer.timed("time/sampling"):
            if sampled or trainer.policy.sharded:  # all processes of a sharded policy gather its weights
                finish_groups(trainer.sampler, sampled, prompts, own_count, step, options)
        for rank, responses in enumerate(world.gather([group.responses for group in own])):
            for group, theirs in zip(unfinished[rank :: world.size], responses, strict=True):
                group.responses = list(theirs)
    return partial.take(missing, options), numbers.stop


def partial_metrics(trainer: Trainer) -> dict[str, float]:
    """Return the metrics of groups that are begun and not trained; none without partial rollouts."""
    options = trainer.config.sampling_options(trainer.config.rollout.samples)
    return {} if trainer.partial is None else trainer.partial.metrics(options)


def choose_problems(trainer: Trainer, numbers: range) -> Sequence[int]:
    """Return the index of a problem for each of these numbers of prompts."""
    if trainer.curriculum is None:
        return [stream_index(trainer.task, trainer.config.run.seed, number) for number in numbers]
    return trainer.world.from_leader(trainer.curriculum.choose(numbers) if trainer.world.leads else [])


def curriculum_metrics(trainer: Trainer, found: SampledGroups) -> dict[str, float]:
    """Return the metrics of a step's curriculum on rank 0; none for a recipe without one."""
    section = trainer.config.curriculum
    if not trainer.world.leads or (section.problems == "uniform" and not section.gates):
        return {}
    metrics = {} if trainer.curriculum is None else trainer.curriculum.metrics()
    metrics["curriculum/admitted_share"] = 1 - found.refused.total() / found.sampled
    metrics["curriculum/sampled"] = found.sampled
    return metrics | {f"curriculum/refused_{gate}": found.refused[gate] for gate in build_gates(trainer.config)}


def sample_and_grade(
    trainer: Trainer,
    problems: Sequence[tuple[int, Problem]],
    step: int,
    options: SamplingOptions,
    training: bool = False,
    begun: Sequence[Sequence[Response]] | None = None,
) -> list[Group]:
    """Sample responses to numbered problems and grade them; return one group per problem.

    With `begun` these are the responses, and nothing is sampled. In training there are also the rewards of
    `reward.terms`, and `reward.noise` flips some verdicts. Each of several processes samples and grades its share of
    the problems. Rank 0 gets all groups; in training the others get what they plan and train with.
    """
    world = trainer.world
    share = world.share(len(problems))
    own, own_begun = problems[share], None if begun is None else begun[share]
    groups = sample_and_grade_alone(trainer, own, step, options, training, own_begun) if own else []
    if trainer.policy.sharded and not own and begun is None:
        _sample_nothing(trainer, step, options)
    if not world.parallel:
        return groups
    tool_errors = [] if trainer.tool_use is None else trainer.tool_use.take_errors()
    ended = [] if trainer.agent_use is None else trainer.agent_use.take_ended()
    shares = world.collect((groups, trainer.rule_errors, tool_errors, ended))
    trainer.rule_errors = RuleErrors.merged([errors for _, errors, _, _ in shares])
    if trainer.tool_use is not None:
        trainer.tool_use.errors = [error for _, _, errors, _ in shares for error in errors]
    if trainer.agent_use is not None:
        trainer.agent_use.ended = [rollout for _, _, _, ended in shares for rollout in ended]
    groups = [group for share, _, _, _ in shares for group in share]
    if not training:
        return groups
    to_train = world.from_leader([[sample.to_train() for sample in group] for group in groups])
    return groups if world.leads else to_train


def _sample_nothing(trainer: Trainer, step: int, options: SamplingOptions) -> None:
    """Take part in sampling without a problem: all processes of a sharded policy gather its weights."""
    if trainer.agent_use is not None:
        trainer.agent_use.sample(trainer.sampler, [], step, options)
    else:
        trainer.sampler.sample([], step, options)


def sample_and_grade_alone(
    trainer: Trainer,
    problems: Sequence[tuple[int, Problem]],
    step: int,
    options: SamplingOptions,
    training: bool,
    begun: Sequence[Sequence[Response]] | None = None,
) -> list[Group]:
    """Sample, unless that was done before, and grade in this process."""
    rewards, limit = trainer.config.reward, trainer.config.rollout.max_new_tokens
    noise = rewards.noise if training else 0.0
    with trainer.timed("time/sampling"):
        groups = sample(trainer, problems, step, options, begun)
    samples = [sample for group in groups for sample in group]
    with trainer.timed("time/grading"):
        set_verdicts(samples)
        terms = grade_terms(samples, rewards) if training else [{} for _ in samples]
    if noise:
        refuse_noisy_numbers(samples)
    numbers = [number for number, _ in problems]
    flips = dict(zip(numbers, choose_flips(numbers, step, options, noise), strict=True))
    left = {id(each): limit - others for each, others in zip(samples, sampled_by_others(samples), strict=True)}
    for graded, found in zip(samples, terms, strict=True):
        _note_errors(trainer, graded, found)
        flip = flips[graded.group][graded.response.sample]
        set_reward(graded, found, flip, rewards, left[id(graded)], training)
    if trainer.agent_use is not None:
        trainer.rule_errors = RuleErrors.merged([trainer.rule_errors, trainer.agent_use.take_errors()])
    return groups


def sampled_by_others(samples: Sequence[Sample]) -> list[int]:
    """Return for each sample how many tokens the other branches of its rollout have sampled."""
    totals = {id(branch): sum(b.response.num_sampled for b in own) for own in by_rollout(samples) for branch in own}
    return [totals[id(each)] - each.response.num_sampled for each in samples]


def sample(
    trainer: Trainer,
    problems: Sequence[tuple[int, Problem]],
    step: int,
    options: SamplingOptions,
    begun: Sequence[Sequence[Response]] | None = None,
) -> list[Group]:
    """Sample responses to numbered problems; with tools they are conversations, whose last messages are graded.

    Of an agent they are the branches of its rollouts, of which some are graded already, and some excluded.
    """
    if trainer.agent_use is not None:
        return trainer.agent_use.sample(trainer.sampler, problems, step, options)
    limits, policy, tool_use = trainer.config.rollout, trainer.policy, trainer.tool_use
    prompts = encode_prompts(policy, problems, limits.max_prompt_tokens, limits.max_new_tokens, tool_use)
    if begun is not None:
        return as_samples(policy, problems, prompts, begun)
    return sample_responses(policy, trainer.sampler, problems, prompts, step, options, tool_use)


def _note_errors(trainer: Trainer, sample: Sample, terms: Mapping[str, Verdict]) -> None:
    if not sample.excluded:  # else it is the agent's, and noted by it
        trainer.rule_errors.add(sample.problem.rule, sample.verdict, sample)
    for name, verdict in terms.items():
        trainer.rule_errors.add(trainer.config.reward.terms[name].rule, verdict, sample)


def sample_texts(responses: Sequence[Sample]) -> list[SampleText]:
    """Return some responses of a step as text, from short to long: evenly spaced in the order of training."""
    some = [responses[n * len(responses) // SAMPLES_LOGGED] for n in range(min(SAMPLES_LOGGED, len(responses)))]
    return [
        SampleText(
            prompt="\n".join(message["content"] for message in each.problem.prompt),
            response=each.text if each.conversation is None else conversation_text(each.conversation),
            answer=each.problem.answer,
            verdict=each.verdict.kind,
            reward=each.reward,
        )
        for each in some
    ]


def remove_excluded(groups: list[Group]) -> tuple[list[Group], list[Sample]]:
    """Split off the responses that are not trained on: return the remaining groups, and the excluded responses."""
    kept, excluded = [], []
    for group in groups:
        remaining = [response for response in group if not response.excluded]
        # A single remaining rollout has nothing to be compared with: its advantage would be zero.
        if len(by_rollout(remaining)) < min(2, len(by_rollout(group))):
            remaining = []
        excluded += [response for response in group if response.excluded or not remaining]
        kept += [remaining] if remaining else []
    return kept, excluded


def split_into_minibatches(groups: list[Group], minibatches: int) -> tuple[list[Sample], list[int]]:
    """Split groups into mini-batches of whole groups; return all responses in order, and the mini-batches' sizes."""
    responses, sizes = [], []
    # With groups dropped or excluded the mini-batches differ by up to one group, and some may be empty.
    bounds = [round(len(groups) * k / minibatches) for k in range(minibatches + 1)]
    for low, high in pairwise(bounds):
        minibatch = [response for group in groups[low:high] for response in group]
        # Micro-batches are cut in this order: neighbours of similar length leave little padding.
        responses += sorted(minibatch, key=len)
        sizes.append(len(minibatch))
    return responses, [size for size in sizes if size]


def evaluate(trainer: Trainer) -> dict[str, float]:
    """Measure the greedy accuracy, and the mean of a rule's numbers, on held-out problems; without any, no metric.

    Problems on which the grader failed count neither as right nor as wrong.
    """
    test, config = trainer.test_task, trainer.config
    if test is None:
        return {}
    problems = [(n, test[n]) for n in range(min(len(test), config.run.eval_problems))]
    # No training step is numbered -1, so evaluation shares no random numbers with one.
    seconds = dict(trainer.seconds)  # an evaluation's sampling and grading are not the training's
    groups = sample_and_grade(trainer, problems, -1, config.sampling_options(samples=1, temperature=0.0))
    trainer.seconds = seconds
    for used in (trainer.tool_use, trainer.agent_use):
        if used is not None:
            used.take_times()
    return trainer.world.from_leader(_evaluation_metrics(trainer, problems, groups) if trainer.world.leads else {})


def _evaluation_metrics(
    trainer: Trainer, problems: Sequence[tuple[int, Problem]], groups: Sequence[Group]
) -> dict[str, float]:
    graded = [(problem.source, group[0].verdict) for (_, problem), group in zip(problems, groups, strict=True)]
    graded = [(source, verdict) for source, verdict in graded if verdict.kind != "crashed"]
    metrics = dict[str, float]()
    if graded:
        sources, right = zip(*((source, verdict.kind == "correct") for source, verdict in graded), strict=True)
        metrics = {"eval/accuracy": fmean(right), **accuracy_by_source("eval/accuracy", sources, right)}
    if any(verdict.score is not None for _, verdict in graded):
        metrics["eval/score"] = fmean(verdict.value for _, verdict in graded)
    if len(graded) < len(problems):
        metrics["eval/crashed_share"] = 1 - len(graded) / len(problems)
    if trainer.seen_share:
        metrics["eval/seen_share"] = trainer.seen_share
    if len(problems) < trainer.config.run.eval_problems:
        metrics["eval/problems"] = len(problems)
    if trainer.tool_use is not None:
        metrics |= evaluation_metrics([group[0].conversation for group in groups if group[0].conversation is not None])
    if trainer.agent_use is not None:
        metrics |= agent_evaluation_metrics(trainer.agent_use.take_ended())
    return metrics


def accuracy_by_source(prefix: str, sources: Sequence[str], right: Sequence[bool]) -> dict[str, float]:
    """Return the share of right answers for each of several data sources; nothing where there is but one."""
    counts = Counter(sources)
    if len(counts) < 2:
        return {}
    shown = [source for source, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:MOST_SOURCES]]
    shares = {s: fmean(r for source, r in zip(sources, right, strict=True) if source == s) for s in shown}
    # A source is a text of the data's: it must not look like another metric, or be endless.
    return {f"{prefix}/{shorten(one_line(s).replace('/', '_'), 60)}": share for s, share in shares.items()}
