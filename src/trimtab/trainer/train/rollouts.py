"""Sample responses and grade them: the rollouts of a training step, and greedy evaluation on held-out problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

from trimtab.agents import Conversation
from trimtab.data import Problem, PromptTokens, Response, SamplingOptions, stream_index
from trimtab.grading import RuleErrors, Submission, Verdict, grade_submissions
from trimtab.text import one_line, shorten
from trimtab.trainer.train.reporting import SampleText
from trimtab.trainer.train.responses import (
    GradedResponse,
    Group,
    Rollouts,
    choose_flips,
    combined_reward,
    conversation_text,
    encode_prompts,
    evaluation_metrics,
    flipped_verdict,
    grade_conversations,
    grade_terms,
    refuse_noisy_numbers,
)
from trimtab.trainer.train.trainer import RunProgress, Trainer

MOST_SOURCES = 20  # data sources with an accuracy of their own, the most frequent
SAMPLES_LOGGED = 4  # responses of a step that loggers get


def collect_rollouts(trainer: Trainer, progress: RunProgress) -> Rollouts:
    """Sample and grade the responses of the next step, and split them into mini-batches."""
    trainer.seconds |= {"time/sampling": 0.0, "time/grading": 0.0}  # of a process without a problem of its own too
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
        problems = [(n, trainer.task[stream_index(trainer.task, config.run.seed, n)]) for n in numbers]
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

    In training there are also the rewards of `reward.terms`, and `reward.noise` flips some verdicts. Each of several
    processes samples and grades its share of the problems; all of them get all groups.
    """
    world = trainer.world
    own = problems[world.share(len(problems))]
    groups = sample_and_grade_alone(trainer, own, step, options, training) if own else []
    if trainer.policy.sharded and not own:
        trainer.sampler.sample([], step, options)  # for the other processes: all of them gather the weights
    if not world.parallel:
        return groups
    tool_errors = [] if trainer.tool_use is None else trainer.tool_use.take_errors()
    shares = world.gather((groups, trainer.rule_errors, tool_errors))
    trainer.rule_errors = RuleErrors.merged([errors for _, errors, _ in shares]) if world.leads else RuleErrors()
    if trainer.tool_use is not None and world.leads:
        trainer.tool_use.errors = [error for _, _, errors in shares for error in errors]
    return [group for share, _, _ in shares for group in share]


def sample_and_grade_alone(
    trainer: Trainer, problems: Sequence[tuple[int, Problem]], step: int, options: SamplingOptions, training: bool
) -> list[Group]:
    """Sample and grade in this process."""
    config = trainer.config
    with trainer.timed("time/sampling"):
        prompts, sampled, texts, held = sample(trainer, problems, step, options)
    pairs = [
        (problem, response) for (_, problem), responses in zip(problems, sampled, strict=True) for response in responses
    ]
    items = [
        Submission.of(text, problem, response.num_sampled, response.finished)
        for text, (problem, response) in zip(texts, pairs, strict=True)
    ]
    # One call for all responses: the graders work on the list in parallel.
    rules, noise = [problem.rule for problem, _ in pairs], config.reward.noise if training else 0.0
    with trainer.timed("time/grading"):
        verdicts = grade_conversations(items, rules, held) if held else grade_submissions(items, rules)
        terms = grade_terms(items, config.reward) if training else [{} for _ in items]
    if noise:
        refuse_noisy_numbers(rules, verdicts)
    _note_errors(trainer, pairs, items, verdicts, terms)
    conversations: list[Conversation | None] = [*held] or [None] * len(texts)
    graded = iter(zip(texts, verdicts, terms, conversations, strict=True))
    flips = choose_flips([number for number, _ in problems], step, options, noise)
    groups = []
    for (number, problem), prompt, responses, flip in zip(problems, prompts, sampled, flips, strict=True):
        group = []
        for response in responses:
            text, verdict, found, conversation = next(graded)
            rewarded = flipped_verdict(verdict) if flip[response.sample] else verdict
            flipped = rewarded != verdict
            reward = combined_reward(rewarded, found, response, config.reward, config.rollout.max_new_tokens)
            failed = any(each.kind == "crashed" for each in (verdict, *found.values()))
            one = GradedResponse(
                problem, prompt.ids, response, text, verdict, reward.value or 0.0, number, reward.value is None,
                flipped, reward.terms, failed, conversation,
            )  # fmt: skip
            void = training and config.reward.void_turns == "exclude" and one.has_void_turn
            group.append(replace(one, excluded=True) if void else one)
        groups.append(group)
    return groups


def sample(
    trainer: Trainer, problems: Sequence[tuple[int, Problem]], step: int, options: SamplingOptions
) -> tuple[list[PromptTokens], list[list[Response]], list[str], list[Conversation]]:
    """Sample responses to numbered problems; return prompts, responses by prompt, the texts to grade, conversations.

    Without tools there are no conversations; with them the text to grade is the last message, never a tool's.
    """
    limits, policy, tool_use = trainer.config.rollout, trainer.policy, trainer.tool_use
    prompts = encode_prompts(policy, problems, limits.max_prompt_tokens, limits.max_new_tokens, tool_use)
    if tool_use is None:
        sampled = trainer.sampler.sample(prompts, step, options)
        texts = policy.decode_batch([response.tokens for responses in sampled for response in responses])
        return prompts, sampled, texts, []
    sampled, held = tool_use.sample(trainer.sampler, [problem for _, problem in problems], prompts, step, options)
    return prompts, sampled, [conversation.last_message for conversation in held], held


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


def sample_texts(responses: Sequence[GradedResponse], count: int = SAMPLES_LOGGED) -> list[SampleText]:
    """Return some responses of a step as text, from short to long: evenly spaced in the order of training."""
    some = [responses[n * len(responses) // count] for n in range(min(count, len(responses)))]
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
    if len(problems) < config.run.eval_problems:
        metrics["eval/problems"] = len(problems)
    if trainer.tool_use is not None:
        metrics |= evaluation_metrics([group[0].conversation for group in groups if group[0].conversation is not None])
        trainer.tool_use.take_times()
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
