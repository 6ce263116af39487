"""Parts of one's own: a method with an option, an attachment, an advantage, a task, two rules and a sampler."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from torch import Tensor

import trimtab as tt
from trimtab.data import Problem, PromptTokens, Response, SamplingOptions, Split, user
from trimtab.objectives import PlanBuilder, TokenRule
from trimtab.trainer.model import Policy
from trimtab.trainer.train import build_sampler


def gentle(softness: Annotated[float, "share of DAPO's clip range"] = 0.5) -> tt.Objective:
    """DAPO with a narrower clip range."""
    if not 0 < softness <= 1:
        raise ValueError(f"softness={softness} must be above 0 and at most 1")
    return tt.objective("dapo", clip_low=0.2 * softness, clip_high=0.28 * softness)


def calm(factor: Annotated[float, "the weight of an improbable token"] = 0.5) -> TokenRule:
    """Lower the weight of tokens that the policy itself finds improbable."""

    def apply(builder: PlanBuilder) -> None:
        improbable = (builder.logp < -2).nonzero().squeeze(1)
        builder.multiply(improbable, factor, tt.Reason.DAMPED)

    return TokenRule("calm", f"w = {factor:g} where ln p < -2", apply)


def above_mean(reward: Tensor, group: Tensor) -> Tensor:
    """Return the reward minus the mean of its group, an advantage for each response."""
    sums = reward.new_zeros(int(group.max()) + 1).index_add_(0, group, reward)
    counts = reward.new_zeros(len(sums)).index_add_(0, group, reward.new_ones(len(reward)))
    return reward - (sums / counts)[group]


def doubling(split: Split, digits: Annotated[int, "digits of each number"] = 1, size: int = 100) -> list[Problem]:
    """Ask for twice a number; every fifth number is held out."""
    numbers = [n for n in range(10**digits) if (n % 5 == 0) == (split == "test")]
    problems = []
    for index in range(size):
        number = numbers[index % len(numbers)]
        answer = str(2 * number)
        prompt = user(f"{number}+{number}=")
        problems.append(Problem(prompt, answer, rule="python:mine:near", source="doubling", solution=answer))
    return problems


def near(response: str, answer: str, extra: dict[str, object]) -> float:
    """Give 1 for the answer, and less the farther a number is from it."""
    text = response.strip()
    return 1 / (1 + abs(int(text) - int(answer))) if text.isdecimal() else 0.0


@tt.rule(batched=True)
def brief(
    responses: Sequence[str], answers: Sequence[str], extras: Sequence[dict[str, object]], *, most: int = 2
) -> list[float]:
    """Give 1 to a response of at most `most` characters; one call for all responses of a step."""
    return [float(len(response) <= most) for response in responses]


class Warmer:
    """Sample at a higher temperature than the trainer's: more different responses, a little off-policy."""

    def __init__(self, policy: Policy, factor: float = 1.2) -> None:
        self.native = build_sampler(policy)
        self.factor = factor

    def sample(self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions) -> list[list[Response]]:
        """Return `options.samples` responses for each prompt, in order."""
        return self.native.sample(prompts, step, replace(options, temperature=options.temperature * self.factor))
