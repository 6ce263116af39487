"""The one carrier from sampler to record: a sampled response, and what each step of the training finds out about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trimtab.data.problems import Problem
from trimtab.data.sampler import Response

if TYPE_CHECKING:  # rooms above this one
    from trimtab.agents import Conversation
    from trimtab.grading import Verdict


@dataclass(eq=False)
class Sample:
    """One response to a problem. The sampler, the graders and the rewards fill it in; training and records read it.

    What is not known yet is None or has its default: a rule that grades a text by itself gets a sample without a
    `response`, and a trainer outside of trimtab records samples without log-probabilities.
    """

    problem: Problem
    text: str = ""  # what is graded: the response as text, of a conversation its last message
    # From the sampler.
    prompt: Sequence[int] = ()  # token ids
    response: Response = None  # type: ignore[assignment]
    group: int = 0  # number of the prompt in the stream of prompts, shared by all its samples
    conversation: Conversation | None = None
    # From the graders.
    verdict: Verdict = None  # type: ignore[assignment]  # always the grader's own, also if the reward is another's
    failed: bool = False  # the task's rule or that of a term has crashed
    # From the rewards.
    reward: float = 0.0
    terms: Mapping[str, float] = field(default_factory=dict)  # each of several rewards by name, before its weight
    excluded: bool = False  # not trained on; its reward means nothing
    flipped: bool = False  # it has the reward of the opposite verdict (`reward.noise`)

    def __len__(self) -> int:
        """Return the number of tokens of prompt and response."""
        return len(self.prompt) + len(self.response.tokens)

    def to_train(self) -> Sample:
        """Return what planning and training read of it, for other processes."""
        nothing = Problem((), "", "", "")
        return Sample(nothing, "", self.prompt, self.response, self.group, reward=self.reward, excluded=self.excluded)

    @property
    def named(self) -> str:
        """Where it comes from and how it begins, for an error."""
        start = self.text[:60] + ("..." if len(self.text) > 60 else "")
        return f"{self.problem.location + ', ' if self.problem.location else ''}the response {start!r}"

    @property
    def has_void_turn(self) -> bool:
        """Whether some message of the conversation has neither a call nor an answer."""
        if self.conversation is None:
            return False
        ended_without = self.conversation.ended == "answer" and self.verdict.kind == "no_answer"
        return self.conversation.void_turns > 0 or ended_without


Group = list[Sample]  # the responses to one prompt
