"""An OpenAI-compatible server on loopback, through which agents sample from the policy of a run."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

from trimtab.agents.chat_tokens import ChatTokens
from trimtab.agents.sealed_rollout import SealedRollout
from trimtab.data import Requests


@dataclass(frozen=True)
class EndpointLimits:
    """What the run imposes on requests, and what one may take.

    `max_tokens` is the most tokens that a prompt and its answer have together. After its client is gone, a request
    runs on for `rejoin_seconds`, in which a retry may join it.
    """

    max_tokens: int
    model: str = "policy"
    temperature: float = 1.0
    top_p: float = 1.0
    max_body: int = 8 << 20  # bytes
    max_messages: int = 2_048
    max_depth: int = 64
    max_requests: int = 1_024  # of a rollout
    max_waiting: int = 256  # of a rollout at a time
    rejoin_seconds: float = 2.0
    body_seconds: float = 60.0  # for a request to arrive


class Session:
    """One rollout: an API key, and the tree of what was sampled with it. Any thread may call its methods."""

    api_key: str

    def reward(self, request: int, value: float) -> None:
        """Note the reward of a request, by its number from 0 in the order in which requests were made."""
        raise NotImplementedError

    @property
    def requests(self) -> int:
        """How many requests were answered so far."""
        raise NotImplementedError

    def seal(self) -> SealedRollout:
        """End the rollout: cancel what still runs, refuse what comes later, and return what there is."""
        raise NotImplementedError


class Endpoint:
    """The server of a run, in a thread of its own; `requests` is what samplers serve. A context manager."""

    url: str  # "http://127.0.0.1:PORT/v1"
    requests: Requests

    def __init__(self, chat: ChatTokens, limits: EndpointLimits) -> None:
        raise NotImplementedError

    def open(self, seed: int, max_new_tokens: int, sample: int = 0) -> Session:
        """Start a rollout, with a fresh random API key.

        `seed` is that of its random numbers, a signed 64-bit integer; `max_new_tokens` is how many tokens it may
        sample over all of its requests; `sample` is its number within its group.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Say that all rollouts of this call have ended: `requests.take` returns None until the next `open`."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop the server; whoever still waits gets an error."""
        raise NotImplementedError

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
