"""The other side of the conversations of one `sample` call: messages in, replies out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trimtab.conversation.reply_template import ReplyTemplate
from trimtab.conversation.tool_set import ToolSet
from trimtab.conversation.types import Conversation, Limits
from trimtab.rollout import Response
from trimtab.tasks import Problem

Answered = Callable[[Problem, str], bool]


@dataclass(frozen=True)
class Reply:
    """The tokens that follow a message, up to the opening of the next one; None: the conversation is over."""

    prompt: int
    sample: int
    tokens: list[int] | None


class Conversations:
    """The conversations of one `sample` call; implements `trimtab.rollout.Turns`.

    `answered` tells whether a message without a call holds an answer; without it every text that is not empty does.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        samples: int,
        tools: ToolSet,
        template: ReplyTemplate,
        limits: Limits,
        answered: Answered | None = None,
    ) -> None:
        self.max_observed_tokens = 0
        raise NotImplementedError

    def submit(self, prompt: int, sample: int, tokens: Sequence[int]) -> None:
        """Take the newest message of a conversation, which ends with an end token. Returns at once."""
        raise NotImplementedError

    def replies(self, block: bool) -> list[Reply]:
        """Return the replies that have come, in any order; with `block` wait until there is at least one."""
        raise NotImplementedError

    def finish(self, groups: Sequence[Sequence[Response]]) -> list[list[Conversation]]:
        """End all conversations and return them, by prompt and sample; call it once, after sampling.

        The responses tell what was cut by the budget of tokens; environments say their rewards here at the latest.
        """
        raise NotImplementedError

    def of(self, prompt: int, sample: int) -> Conversation:
        """Return a conversation."""
        raise NotImplementedError
