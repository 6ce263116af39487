"""A sampler in a thread that answers an endpoint's requests by a function, and keeps what it was asked."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from trimtab.agents import Endpoint
from trimtab.data import Request, Response

Policy = Callable[[Request], str | list[int]]  # a text gets an end token


@dataclass
class FakeSampler:
    """What was asked so far, and how many at a time; answers are kept back until `free` is set."""

    tokenizer: Any
    policy: Policy
    requests: list[Request] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    arrived: threading.Condition = field(default_factory=threading.Condition)
    free: threading.Event = field(default_factory=threading.Event)

    def wait_for(self, count: int) -> list[Request]:
        """Wait until so many requests have come."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.requests) >= count, timeout=30)
            return list(self.requests)

    def serve(self, endpoint: Endpoint) -> None:
        """Answer until there are no more requests."""
        taken: queue.SimpleQueue[list[Request] | None] = queue.SimpleQueue()
        answering = threading.Thread(target=self.answer, args=(endpoint, taken), daemon=True)
        answering.start()
        while (requests := endpoint.requests.take(block=True)) is not None:
            with self.arrived:
                self.requests += requests
                self.batches.append(len(requests))
                self.arrived.notify_all()
            taken.put(requests)
        taken.put(None)
        answering.join(30)

    def answer(self, endpoint: Endpoint, taken: queue.SimpleQueue[list[Request] | None]) -> None:
        """Answer requests as they come, while that is allowed."""
        while (requests := taken.get()) is not None:
            self.free.wait()
            for request in requests:
                if not request.cancelled:
                    endpoint.requests.answer(request, self.response(request))

    def response(self, request: Request) -> Response:
        """Return what the policy says, ended by an end token, a stop string or the limit."""
        said = self.policy(request)
        tokens = said
        if isinstance(said, str):
            tokens = [*self.tokenizer.encode(said, add_special_tokens=False), self.tokenizer.eos_token_id]
        tokens = list(tokens)
        finished = len(tokens) <= request.max_new_tokens
        tokens = tokens[: request.max_new_tokens]
        for count in range(1, len(tokens) + 1) if request.stop else ():
            end = request.stop(tokens[:count])
            if end is not None:
                return Response(tokens[:end], [-0.5] * end, True)
        return Response(tokens, [-0.5] * len(tokens), finished)


@contextmanager
def sampling(endpoint: Endpoint, tokenizer: Any, policy: Policy) -> Iterator[FakeSampler]:
    """Run a fake sampler for an endpoint, which is closed at the end."""
    sampler = FakeSampler(tokenizer, policy)
    sampler.free.set()
    thread = threading.Thread(target=sampler.serve, args=(endpoint,), daemon=True)
    thread.start()
    try:
        with endpoint:
            yield sampler
    finally:
        sampler.free.set()
        thread.join(30)
        assert not thread.is_alive()
