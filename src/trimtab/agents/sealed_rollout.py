"""What an agent's rollout has left when it is over: its branches as training samples, and what happened on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab.agents.types import Message
from trimtab.data import Response

# Why a request could not go on from stored tokens, so that the conversation was rendered anew as a new root.
NEW_ROOTS: dict[str, str] = {
    "edited": "the request holds messages of the assistant that were not sampled here, or were changed since",
    "system": "the system message has changed",
    "tools": "the tools have changed",
    "rewritten": "the chat template writes earlier messages differently once the new ones follow",
    "roles": "the chat template cannot write the new messages behind the model's own",
}


@dataclass(frozen=True)
class Branch:
    """One training sample: a path from a root to a leaf, less what an earlier branch trains.

    `prompt` is the context that the model really saw before the branch's first own token. `response` has the tokens
    from there on; its `observed` ranges are what others wrote in between. `messages` are those of the whole path in
    words, those of the context too. `requests` are the numbers of the requests that sampled its own tokens, in order,
    and `reward` is the mean of the rewards that were given for these; None if none was.
    """

    prompt: list[int]
    response: Response
    messages: list[Message]
    requests: tuple[int, ...] = ()
    reward: float | None = None


@dataclass(frozen=True)
class RolloutStats:
    """What happened in a rollout.

    `requests` were answered by sampling, and `merged` of them went on from stored tokens. `turns` is the number of
    messages that are trained. `ended` is "" or what the agent was refused: `context_length`, `token_budget` or
    `request_limit`. `error` is the traceback of the first failure of the endpoint's own code.
    """

    requests: int = 0
    branches: int = 0
    turns: int = 0
    merged: int = 0
    replayed: int = 0  # retries that got the recorded answer
    joined: int = 0  # retries that waited for the running one
    abandoned: int = 0  # answers that nobody received, nor went on from: not trained
    cancelled: int = 0  # requests whose client was gone, or that still ran when the rollout was sealed
    sampled_tokens: int = 0
    overridden: Mapping[str, int] = field(default_factory=dict)  # parameters that the run imposes, by name
    new_roots: Mapping[str, int] = field(default_factory=dict)  # by reason, see NEW_ROOTS
    refused: Mapping[str, int] = field(default_factory=dict)  # requests by the code of their error
    ended: str = ""
    error: str = ""

    @property
    def merged_share(self) -> float:
        """The share of the requests that went on from stored tokens."""
        return self.merged / self.requests if self.requests else 0.0


@dataclass(frozen=True)
class SealedRollout:
    """A rollout that takes no more requests: every sampled token is in exactly one branch, or was abandoned."""

    branches: tuple[Branch, ...]
    last_message: str  # the text of the last message of the model, for the task's rule; "" if there is none
    stats: RolloutStats
