"""The messages of one rollout as a tree: what a request goes on from, and the branches to train at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.agents.chat_tokens import ChatMessage, ChatTokens
from trimtab.agents.sealed_rollout import Branch
from trimtab.data import Response


@dataclass(eq=False)
class Place:
    """Where in the tree a request stands: the context that its answer is sampled from, as token ids in `prompt`.

    `parent` is the turn that it goes on from; None at a root. `new_root` is why it is a root although something was
    sampled before ("" if there is no such reason).
    """

    prompt: list[int]
    parent: Turn | None
    new_root: str


@dataclass(eq=False)
class Turn:
    """A sampled message, and its place."""

    place: Place
    response: Response
    number: int  # of its request


class MessageTree:
    """The tree of one rollout. Not for several threads at once."""

    def __init__(self, chat: ChatTokens, max_tokens: int) -> None:
        raise NotImplementedError

    def place(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> Place:
        """Return where a request stands: behind the deepest turn whose path of messages prefixes it, or at a root."""
        raise NotImplementedError

    def add(self, place: Place, number: int, response: Response, reply: Mapping[str, Any]) -> Turn:
        """Add a sampled message; `reply` is what the agent got for it, and may send back."""
        raise NotImplementedError

    def branches(self, sample: int = 0, rewards: Mapping[int, float] | None = None) -> list[Branch]:
        """Return the branches: every sampled token in one of them, but for those of abandoned turns."""
        raise NotImplementedError
