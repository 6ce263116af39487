"""Graded responses: what sampling and grading return for a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from trimtab.agents import Conversation
from trimtab.data import Problem, Response
from trimtab.grading import Verdict
from trimtab.trainer.model import Transcript


@dataclass(frozen=True)
class GradedResponse:
    """A sampled response with its verdict and reward; `group` is its prompt's number in the stream of prompts.

    An `excluded` response is not trained on, and its reward means nothing. A `flipped` one has the reward of the
    opposite verdict (`reward.noise`); `verdict` is always the grader's own. `terms` has each of several rewards by
    name, before its weight. `failed`: the task's rule or that of a term has crashed. `text` is what was graded: of a
    conversation the last message.
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
    conversation: Conversation | None = None

    @property
    def has_void_turn(self) -> bool:
        """Whether some message of the conversation has neither a call nor an answer."""
        if self.conversation is None:
            return False
        ended_without = self.conversation.ended == "answer" and self.verdict.kind == "no_answer"
        return self.conversation.void_turns > 0 or ended_without

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
