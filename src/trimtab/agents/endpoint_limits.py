"""What a run imposes on the requests of agents, and what one may take."""

from __future__ import annotations

from dataclasses import dataclass


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
    max_body: int = 4 << 20  # bytes
    max_messages: int = 2_048
    max_depth: int = 64
    max_requests: int = 1_024  # of a rollout
    max_waiting: int = 256  # of a rollout at a time
    max_connections: int = 4_096  # of all rollouts; a quarter of the files that the process may open, if less
    rejoin_seconds: float = 2.0
    body_seconds: float = 60.0  # for a request to arrive
