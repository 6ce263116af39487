"""Requests without an endpoint: they come at the sampler's polls, in any order, and may follow an answer."""

from __future__ import annotations

import queue
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimtab.data import PromptTokens, Request, Response, SamplingOptions
from trimtab.trainer.sampling import rng_keys


def nothing_follows(request: Request, response: Response) -> Iterable[Request]:
    """Ask for nothing after an answer."""
    return ()


@dataclass
class ArrivingRequests:
    """Requests that come after a random number of polls, which goes by `order`; `then` asks for more after an answer.

    `at_poll` is called at every poll with its number.
    """

    come: list[Request]
    order: int = 0
    max_delay: int = 0
    max_tokens: int = 300
    then: Callable[[Request, Response], Iterable[Request]] = nothing_follows
    at_poll: Callable[[int], None] = lambda number: None
    answers: dict[Request, Response] = field(default_factory=dict)  # in their order
    polls: int = 0
    blocked: int = 0  # how often it was asked to block
    _coming: list[tuple[int, Request]] = field(default_factory=list)
    _open: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.order)
        self._ask(self.come)

    def _ask(self, requests: Iterable[Request]) -> None:
        self._coming += [(self.polls + self._rng.randint(0, self.max_delay), request) for request in requests]
        self._rng.shuffle(self._coming)

    def take(self, block: bool) -> list[Request] | None:
        self.polls += 1
        self.at_poll(self.polls)
        self._open = [request for request in self._open if not request.cancelled]
        if not (self._coming or self._open):
            return None
        assert self._coming or not block, "it blocks where only its own answers could bring more requests"
        if block:
            self.blocked += 1
            self.polls = max(self.polls, min(poll for poll, _ in self._coming))
        come = [request for poll, request in self._coming if poll <= self.polls]
        self._coming = [(poll, request) for poll, request in self._coming if poll > self.polls]
        self._open += come
        return come

    def answer(self, request: Request, response: Response) -> None:
        assert request in self._open, "answered twice, or before it came, or though it was cancelled"
        self._open.remove(request)
        self.answers[request] = response
        self._ask(self.then(request, response))


class ThreadRequests:
    """Requests of other threads, which wait for their answers; `leave` says that there will be no more."""

    max_tokens = 300

    def __init__(self) -> None:
        self._asked: queue.Queue[Request | None] = queue.Queue()
        self._replies: dict[Request, queue.Queue[Response]] = {}

    def ask(self, request: Request) -> Response:
        """Wait for the answer to a request."""
        self._replies[request] = queue.Queue()
        self._asked.put(request)
        return self._replies[request].get(timeout=60)

    def leave(self) -> None:
        self._asked.put(None)

    def take(self, block: bool) -> list[Request] | None:
        taken = [self._asked.get(timeout=60)] if block else []
        while not self._asked.empty():
            taken.append(self._asked.get_nowait())
        return None if None in taken else [request for request in taken if request is not None]

    def answer(self, request: Request, response: Response) -> None:
        self._replies[request].put(response)


def requests_for(
    prompts: Sequence[PromptTokens], step: int, options: SamplingOptions, **how: Any
) -> list[list[Request]]:
    """Return requests with the keys that `sample` gives the samples of these prompts."""
    keys = rng_keys(options.seed, step, [prompt.number for prompt in prompts], options.samples)
    keys = keys.view(len(prompts), options.samples)
    return [
        [Request(prompt.ids, key, options.max_new_tokens, **how) for key in its_keys]
        for prompt, its_keys in zip(prompts, keys.tolist(), strict=True)
    ]
