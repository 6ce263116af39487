"""A step's experience: prompts drawn in order, responses sampled, graded and scored, ready to be planned over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise

import numpy as np
import torch
from torch import Tensor

from trimtab.config import Config, RewardConfig
from trimtab.objectives import NotFiniteError, Objective, TokenBatch, segment_ids
from trimtab.policy import Policy, Transcript, score, to_device
from trimtab.rewards import Verdict, grade_many
from trimtab.rollout import PromptTokens, Response, Sampler, SamplingOptions
from trimtab.tasks import Problem, Task, problem_index


@dataclass(frozen=True)
class GradedResponse:
    """One response with all that is known of it. One that is `left_out` is not trained on; its reward means nothing."""

    problem: Problem
    prompt: Sequence[int]
    response: Response
    text: str
    verdict: Verdict
    reward: float
    group: int
    left_out: bool = False

    @cached_property
    def transcript(self) -> Transcript:
        """Prompt and response as token ids."""
        return Transcript(self.prompt, self.response.tokens)


@dataclass(frozen=True)
class Experience:
    """The answers of a step in the order they are trained on, cut into mini-batches; and those left out of training.

    With a `fault` (a score that is not finite) there is nothing to train on: no mini-batch, no token.
    """

    answers: list[GradedResponse]
    sizes: list[int]
    batch: TokenBatch
    position: int
    dropped_groups: int
    fault: NotFiniteError | None = None
    left_out: Sequence[GradedResponse] = ()

    @property
    def transcripts(self) -> list[Transcript]:
        """Prompts and responses as token ids."""
        return [answer.transcript for answer in self.answers]


def encode_prompts(policy: Policy, problems: Sequence[tuple[int, Problem]], limit: int) -> list[PromptTokens]:
    """Prompts as tokens; `number` is where the prompt stands in the run's stream."""
    encoded = policy.encode_batch([problem.prompt for _, problem in problems])
    prompts = [PromptTokens(ids, number) for ids, (number, _) in zip(encoded, problems, strict=True)]
    for (_, problem), prompt in zip(problems, prompts, strict=True):
        if not 0 < len(prompt.ids) <= limit:
            raise ValueError(
                f"a prompt of {problem.source} has {len(prompt.ids)} tokens; rollout.max_prompt_tokens={limit} "
                "(raise it, or leave such problems out)"
            )
    return prompts


def answer_problems(
    policy: Policy,
    sampler: Sampler,
    problems: Sequence[tuple[int, Problem]],
    step: int,
    options: SamplingOptions,
    config: Config,
) -> list[list[GradedResponse]]:
    """Sample and grade: for every problem its group of answers."""
    prompts = encode_prompts(policy, problems, config.rollout.max_prompt_tokens)
    sampled = sampler.sample(prompts, step, options)
    said = policy.decode_batch([response.tokens for responses in sampled for response in responses])
    asked = [problem for (_, problem), responses in zip(problems, sampled, strict=True) for _ in responses]
    graded = iter(zip(said, grade_many(list(zip(said, asked, strict=True))), strict=True))
    groups = []
    for (number, problem), prompt, responses in zip(problems, prompts, sampled, strict=True):
        group = []
        for response in responses:
            text, verdict = next(graded)
            reward = reward_of(verdict, response, config.reward, config.rollout.max_new_tokens)
            left_out = reward is None
            group.append(GradedResponse(problem, prompt.ids, response, text, verdict, reward or 0.0, number, left_out))
        groups.append(group)
    return groups


def reward_of(verdict: Verdict, response: Response, config: RewardConfig, limit: int) -> float | None:
    """The reward of the verdict's kind, less DAPO's soft penalty for the last stretch of an overlong response.

    None where a response of this kind is left out of training.
    """
    reward = config.of(verdict.kind)
    if reward is not None and config.overlong_buffer:
        over = len(response.tokens) - (limit - config.overlong_buffer)
        reward += min(-over / config.overlong_buffer, 0.0) * config.overlong_factor
    return reward


def collect(
    policy: Policy, sampler: Sampler, task: Task, position: int, step: int, config: Config
) -> tuple[list[list[GradedResponse]], int, int]:
    """A step's groups, how many were dropped for want of spread, and the new position in the stream of prompts."""
    wanted, options = config.rollout.prompts, config.sampling_options(config.rollout.samples)
    groups: list[list[GradedResponse]] = []
    dropped = 0
    rounds = config.rollout.dynamic_max_rounds if config.rollout.dynamic_sampling else 1
    for _ in range(rounds):
        missing = wanted - len(groups)
        count = int(missing * config.rollout.dynamic_oversample) if config.rollout.dynamic_sampling else missing
        numbers = range(position, position + count)
        problems = [(n, task[problem_index(len(task), config.run.seed, n)]) for n in numbers]
        drawn = answer_problems(policy, sampler, problems, step, options, config)
        mixed = [group for group in drawn if has_spread(group)] if config.rollout.dynamic_sampling else drawn
        used = mixed[:missing]
        groups += used
        # Prompts behind the last used group were not needed: the next step meets them again.
        position = used[-1][0].group + 1 if len(used) == missing else position + count
        dropped += sum(not has_spread(group) for group in drawn) if config.rollout.dynamic_sampling else 0
        if len(groups) == wanted:
            break
    return groups, dropped, position


def has_spread(group: Sequence[GradedResponse]) -> bool:
    """Whether the rewards of a group differ: without that there is nothing to learn from it."""
    return len({answer.reward for answer in group if not answer.left_out}) > 1


def set_apart(groups: list[list[GradedResponse]]) -> tuple[list[list[GradedResponse]], list[GradedResponse]]:
    """The groups without the answers that are left out, and these.

    A group that is left with one answer goes too: alone it has nothing to be compared with.
    """
    kept = [[answer for answer in group if not answer.left_out] for group in groups]
    whole = [len(few) == len(group) or len(few) > 1 for few, group in zip(kept, groups, strict=True)]
    left_out = [a for group, fine in zip(groups, whole, strict=True) for a in group if a.left_out or not fine]
    return [few for few, fine in zip(kept, whole, strict=True) if few and fine], left_out


def arrange(groups: list[list[GradedResponse]], updates: int) -> tuple[list[GradedResponse], list[int]]:
    """Whole groups to each mini-batch, and within one by length, so that parts hold little padding."""
    answers, sizes = [], []
    bounds = [round(len(groups) * k / updates) for k in range(updates + 1)]
    for low, high in pairwise(bounds):
        chosen = [answer for group in groups[low:high] for answer in group]
        answers += sorted(chosen, key=lambda answer: len(answer.transcript))
        sizes.append(len(chosen))
    return answers, [size for size in sizes if size]


def gather_experience(
    policy: Policy,
    sampler: Sampler,
    task: Task,
    objective: Objective,
    reference: Policy | None,
    position: int,
    step: int,
    config: Config,
) -> Experience:
    """Sample, grade and score a step."""
    groups, dropped, position = collect(policy, sampler, task, position, step, config)
    groups, left_out = set_apart(groups)
    answers, sizes = arrange(groups, config.update.per_step)
    try:
        batch = score_answers(policy, answers, objective, reference, config)
    except NotFiniteError as error:
        return Experience(answers, [], no_tokens(policy, objective), position, dropped, error, left_out)
    return Experience(answers, sizes, batch, position, dropped, left_out=left_out)


def no_tokens(policy: Policy, objective: Objective) -> TokenBatch:
    """The batch of a step without anything to train on."""
    none = torch.zeros(0, device=policy.device)
    fields = dict.fromkeys(("entropy", "sampler_logp", *objective.needs), none)
    return TokenBatch(old_logp=none, advantage=none, sequence=none, **fields)  # type: ignore[arg-type]


def score_answers(
    policy: Policy, answers: Sequence[GradedResponse], objective: Objective, reference: Policy | None, config: Config
) -> TokenBatch:
    """The token batch of a step: old log-probabilities, entropies, moments, advantages, segments."""
    transcripts = [answer.transcript for answer in answers]
    passes = (config.rollout.temperature, config.update.token_budget, config.update.head_chunk)
    if not answers:
        return no_tokens(policy, objective)
    measured = score(policy, transcripts, *passes)
    # A GPU has only been asked for these: what the host does before `TokenBatch` waits for them takes no time.
    ids = np.concatenate([line.ids[len(line.prompt) :] for line in transcripts])
    owner = np.repeat(np.arange(len(answers)), [len(answer.response.tokens) for answer in answers])
    whole = [ids, owner, np.array([answer.group for answer in answers])]
    if "segment" in objective.needs:
        made = segment_ids(torch.from_numpy(ids), policy.tokenizer, sequence=torch.from_numpy(owner))
        whole.append(made.numpy())
    logps = np.fromiter(chain.from_iterable(answer.response.logp for answer in answers), np.float32)
    rewards = np.array([answer.reward for answer in answers], np.float32)
    advantages = objective.advantages(torch.from_numpy(rewards), torch.from_numpy(whole[2])).numpy()
    token, sequence, group, *segment = to_device(policy.device, *whole)
    sampler_logp, reward, advantage = to_device(policy.device, logps, rewards, advantages)
    return TokenBatch(
        old_logp=measured.logp,
        current_logp=measured.logp if "current_logp" in objective.needs else None,  # no update yet: they are the same
        entropy=measured.entropy,
        sum_p2=measured.sum_p2,
        sum_p2_logp=measured.sum_p2_logp,
        advantage=advantage[sequence],
        sequence=sequence,
        token=token,
        segment=segment[0] if segment else None,
        sampler_logp=sampler_logp,
        ref_logp=None if reference is None else score(reference, transcripts, *passes).logp,
        group=group,
        reward=reward,
        responses=len(answers),
    )


def with_current(policy: Policy, batch: TokenBatch, transcripts: Sequence[Transcript], config: Config) -> TokenBatch:
    """The batch as the current policy sees it, for `token_stats = "current"`."""
    passes = (config.rollout.temperature, config.update.token_budget, config.update.head_chunk)
    now = score(policy, transcripts, *passes)
    return replace(batch, current_logp=now.logp, entropy=now.entropy, sum_p2=now.sum_p2, sum_p2_logp=now.sum_p2_logp)


def mismatch(batch: TokenBatch) -> Tensor:
    """How far the sampler's log-probabilities are from the trainer's, per token."""
    assert batch.sampler_logp is not None
    return (batch.sampler_logp - batch.old_logp).abs()
