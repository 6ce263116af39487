"""Score rollouts with the policy: the token batch of a step, with old log-probs, entropies, moments and advantages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from trimtab.data import Sample, rollout_ids
from trimtab.objectives import Moments, NotFiniteError, Objective, TokenBatch, segment_ids
from trimtab.trainer.model import (
    Policy,
    Transcript,
    least_passes,
    response_shares,
    score,
    share_sizes,
    to_device,
    tool_tokens,
)
from trimtab.trainer.train.partial_rollouts import token_lags
from trimtab.trainer.train.rewards import separate_rewards
from trimtab.trainer.train.rollouts import Rollouts
from trimtab.trainer.train.trainer import Trainer


@dataclass(frozen=True)
class Minibatch:
    """The responses of one update: its number in the step, the index of its first response, tokens and transcripts.

    The numbers of a second pass over the step's mini-batches go on where those of the first end.
    """

    number: int
    first: int
    batch: TokenBatch
    transcripts: list[Transcript]
    last_pass: bool = True


@dataclass(frozen=True)
class Experience:
    """The scored rollouts of a step. If a score is not finite (`nonfinite`), there are no tokens to train on.

    `lags` says of every token, where it is known, how many steps older the weights are that sampled it.
    """

    rollouts: Rollouts
    batch: TokenBatch
    transcripts: list[Transcript]
    nonfinite: NotFiniteError | None = None
    lags: NDArray[np.int64] | None = None

    def minibatches(self, passes: int = 1) -> Iterator[Minibatch]:
        """Yield the mini-batches of the step's updates, all of them once per pass."""
        sizes = self.rollouts.minibatch_sizes if self.nonfinite is None else []
        bounds = list(pairwise(accumulate(sizes, initial=0)))
        for number, (first, last) in enumerate(bounds * passes):
            last_pass = number >= len(bounds) * (passes - 1)
            # Lazily, so that the tensors of one mini-batch exist at a time.
            yield Minibatch(number, first, self.batch.select(first, last), self.transcripts[first:last], last_pass)


def score_rollouts(trainer: Trainer, rollouts: Rollouts) -> Experience:
    """Score the rollouts of a step; a value that is not finite makes the step an empty one."""
    transcripts = transcripts_of(rollouts.responses, trainer.config.rollout.keeps)
    lags = token_lags([sample.response for sample in rollouts.responses], rollouts.step)
    try:
        batch = score_responses(trainer, rollouts.responses, transcripts)
    except NotFiniteError as error:
        return Experience(rollouts, empty_batch(trainer.policy, trainer.objective), transcripts, error)
    if lags is not None:
        batch = with_sampled_logp(batch, lags, trainer.objective)
    return Experience(rollouts, batch, transcripts, lags=lags)


def with_sampled_logp(batch: TokenBatch, lags: NDArray[np.int64], objective: Objective) -> TokenBatch:
    """Return the batch whose ratios are to the weights that sampled each token.

    Rules go on judging tokens by the present policy, whose entropies and moments the batch has. An objective that reads
    the sampler's log-probabilities by itself, as corrections do, gets its batch as it is.
    """
    if "sampler_logp" in objective.needs:
        return batch
    assert batch.sampler_logp is not None
    is_old = torch.from_numpy(lags > 0).to(batch.old_logp.device)
    # Where the weights are the present ones, both are of the same policy, and the scored ones have the trainer's
    # precision.
    return replace(batch, old_logp=torch.where(is_old, batch.sampler_logp, batch.old_logp), current_logp=batch.old_logp)


def transcripts_of(samples: Sequence[Sample], exact_truncation: bool = False) -> list[Transcript]:
    """Return the tokens of samples as forward passes read them, with what top-k and top-p kept if that is scored."""
    if not exact_truncation:
        return [Transcript(each.prompt, each.response.tokens, each.response.observed) for each in samples]
    if any(each.response.kept is None for each in samples):
        raise ValueError(
            "rollout.exact_truncation = true needs the tokens that top-p and top-k kept, and the sampler returned a "
            "response without them: return Response(..., kept=...), or set it to false"
        )
    return [
        Transcript(each.prompt, each.response.tokens, each.response.observed, each.response.kept) for each in samples
    ]


def score_responses(trainer: Trainer, responses: Sequence[Sample], transcripts: Sequence[Transcript]) -> TokenBatch:
    """Return the token batch of graded responses, with every field that the objective needs."""
    policy, objective = trainer.policy, trainer.objective
    if not responses:
        return empty_batch(policy, objective)
    sampled = trainer.config.update.old_stats == "sampled"
    scores = _sampled_moments(policy, responses) if sampled else _score(trainer, policy, transcripts)
    # A GPU is still computing the scores: whatever the host prepares before `TokenBatch` checks them costs no time.
    ids = np.concatenate([transcript.sampled_tokens for transcript in transcripts])
    owner = np.repeat(np.arange(len(responses)), [transcript.num_sampled for transcript in transcripts])
    integers = [ids, owner, np.array([response.group for response in responses])]
    if "segment" in objective.needs:
        token, sequence = torch.from_numpy(ids), torch.from_numpy(owner)
        after_tool = torch.from_numpy(tool_tokens(transcripts)) > 0
        segments = segment_ids(token, policy.tokenizer, sequence=sequence, after_tool=after_tool)
        integers.append(segments.numpy())
    logps = np.concatenate([response.response.logp for response in responses])
    rewards = np.array([response.reward for response in responses], np.float32)
    rollouts = None
    if any(response.branch is not None for response in responses):
        rollouts = rollout_ids([each.group for each in responses], [each.response.sample for each in responses])
        integers.append(np.array(rollouts))
    paid, weights = separate_rewards(responses, trainer.config.reward) if objective.separate_rewards else (rewards, [])
    groups = torch.from_numpy(integers[2])
    advantages = objective.advantages(torch.from_numpy(paid), groups, rollouts, weights or None).numpy()
    # One copy to the GPU per dtype instead of one per column.
    token, sequence, group, *others = to_device(policy.device, *integers)
    sampler_logp, reward, advantage = to_device(policy.device, logps, rewards, advantages)
    reference = trainer.reference
    return TokenBatch(
        old_logp=scores.logp,
        current_logp=scores.logp if "current_logp" in objective.needs else None,  # before the first update: the same
        entropy=scores.entropy,
        sum_p2=scores.sum_p2,
        sum_p2_logp=scores.sum_p2_logp,
        advantage=advantage[sequence],
        sequence=sequence,
        token=token,
        segment=others[0] if "segment" in objective.needs else None,
        sampler_logp=sampler_logp,
        ref_logp=None if reference is None else _score(trainer, reference, transcripts).logp,
        group=group,
        reward=reward,
        rollout=None if rollouts is None else others[-1],
        responses=len(responses),
    )


def rescore(trainer: Trainer, minibatch: Minibatch) -> Minibatch:
    """Return the mini-batch with statistics of the policy as it is now, for `update.token_stats = "current"`."""
    logp, entropy, sum_p2, sum_p2_logp = _score(trainer, trainer.policy, minibatch.transcripts)
    batch = replace(minibatch.batch, current_logp=logp, entropy=entropy, sum_p2=sum_p2, sum_p2_logp=sum_p2_logp)
    return replace(minibatch, batch=batch)


def measured_change(trainer: Trainer, experience: Experience) -> dict[str, float]:
    """Score a step's responses once more after its updates; return how the mean entropy of its tokens has moved."""
    if not experience.batch.tokens:
        return {}
    # Of the same tokens: the next rollout has other prompts, whose entropies differ by more than an update moves them.
    after = _score(trainer, trainer.policy, experience.transcripts)
    assert experience.batch.entropy is not None
    return {"update/entropy_change": float(after.entropy.mean() - experience.batch.entropy.mean())}


def empty_batch(policy: Policy, objective: Objective) -> TokenBatch:
    """Return the batch of a step that has nothing to train on."""
    # With all the fields of a full batch: controllers and recorder treat it like any other.
    none = torch.zeros(0, device=policy.device)
    fields = dict.fromkeys(("entropy", "sampler_logp", *objective.needs), none)
    return TokenBatch(old_logp=none, advantage=none, sequence=none, **fields)  # type: ignore[arg-type]


def _sampled_moments(policy: Policy, responses: Sequence[Sample]) -> Moments:
    """Return the moments that the sampler has of every token, for `update.old_stats = "sampled"`."""
    found = [each.response.moments for each in responses if each.response.moments is not None]
    return Moments(*to_device(policy.device, *np.concatenate(found, axis=1)))


def _score(trainer: Trainer, model: Policy, transcripts: Sequence[Transcript]) -> Moments:
    """Score transcripts with the policy or the reference; each of several processes scores its share."""
    world, rollout, update = trainer.world, trainer.config.rollout, trainer.config.update
    shares = response_shares(model, transcripts, world)
    passes = least_passes(model, share_sizes(model, transcripts, shares, update.token_budget))
    own = score(
        model,
        transcripts[shares[world.rank]],
        rollout.temperature,
        update.token_budget,
        update.head_chunk,
        None,
        passes,
    )
    if not world.parallel:
        return own
    tokens = [sum(t.num_sampled for t in transcripts[share]) for share in shares]
    return Moments(*world.gather_columns(torch.stack(own), tokens))
