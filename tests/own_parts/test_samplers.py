"""Samplers of the user's own in conversations: without `turns` they are refused, and what they return is checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from helpers.sampling.turns import RandomTurns
from trimtab.data import PromptTokens, Response, SamplingOptions, Turns
from trimtab.own_parts import OwnPartError
from trimtab.trainer.sampling.own_sampler import OwnSampler

OPTIONS = SamplingOptions(samples=1, max_new_tokens=3)
PROMPTS = [PromptTokens([5], 0)]


@dataclass
class Talking:
    """Gives every prompt the same response."""

    response: Any

    def sample(
        self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions, turns: Turns | None = None
    ) -> list[list[Response]]:
        return [[self.response] for _ in prompts]


class Silent(Talking):
    """Knows nothing of conversations."""

    def sample(self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions) -> Any:  # type: ignore[override]
        return super().sample(prompts, step, options)


def test_a_sampler_that_takes_no_turns_is_refused_only_for_conversations() -> None:
    single = Response([6, 2], [-1.0, -1.0], True)
    sampler = OwnSampler("python:mine:Silent", Silent(single), 10)
    assert sampler.sample(PROMPTS, 0, OPTIONS) == [[single]]
    with pytest.raises(OwnPartError, match=r"mine:Silent: .*its method sample takes no `turns`.*leave the tools out"):
        sampler.sample(PROMPTS, 0, OPTIONS, RandomTurns())


def test_the_budget_and_the_log_probs_are_those_of_sampled_tokens() -> None:
    conversation = Response([6, 2, 7, 7, 7, 7, 2], [-1.0] * 3, True, observed=((2, 6),))
    sampler = OwnSampler("python:mine:Talking", Talking(conversation), 10)
    assert sampler.sample(PROMPTS, 0, OPTIONS, RandomTurns()) == [[conversation]]


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (Response([6, 7, 7, 2], [-1.0] * 4, True, observed=((1, 3),)), "log-probability .* each of its 2 sampled"),
        (Response([6, 7, 2], [-1.0], True, observed=((2, 1),)), r"has observed=.*ranges \(start, end\)"),
        (Response([6, 7, 2], [-1.0], True, observed=((1, 4),)), r"ranges \(start, end\) of its tokens in order"),
        (Response([6, 7, 2], [-1.0], True, observed=((1,),)), r"ranges \(start, end\)"),  # type: ignore[arg-type]
        (Response([6, 7], [], True, observed=((0, 2),)), "has 0 sampled tokens"),
    ],
)
def test_a_wrong_conversation_is_named(response: Response, message: str) -> None:
    with pytest.raises(OwnPartError, match=f"response 0 to prompt 0 .*{message}"):
        OwnSampler("python:mine:Talking", Talking(response), 10).sample(PROMPTS, 0, OPTIONS, RandomTurns())
