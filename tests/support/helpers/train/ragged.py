"""A sampler without a model: every response has a length of its own, and it keeps what it sampled, and when."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from itertools import count

from trimtab.data import Request, Requests, Response, SamplingOptions
from trimtab.trainer.model import Policy

Sampled = tuple[int, float, int]  # token, log-probability, version of the weights


@dataclass
class RaggedSampler:
    """Samples by passes, as a real sampler does, with as many slots as it is given.

    `version` is that of the weights; `log` has all that was sampled by random key and position; `asked` are the random
    keys of each call in the order of its requests.
    """

    policy: Policy
    longest: int
    version: int = 0
    passes: int = 0
    log: dict[tuple[int, int], Sampled] = field(default_factory=dict)
    asked: list[list[int]] = field(default_factory=list)
    _numbers: count[int] = field(default_factory=count)

    def length(self, key: int) -> int:
        """The length of a response, which is log-normal."""
        return max(1, min(self.longest + 1, int(random.Random(key).lognormvariate(1.0, 1.0))))

    def serve(self, requests: Requests, options: SamplingOptions) -> None:
        waiting = deque(requests.take(block=True) or [])
        self.asked.append([request.key for request in waiting])
        running: dict[Request, list[Sampled]] = {}
        while running or waiting:
            while waiting and (waiting[0].halted or len(running) < options.batch_size):
                request = waiting.popleft()
                if not request.halted:
                    running[request] = self.begun(request)
            for request, tokens in running.items():
                tokens.append(self.sample(request, len(tokens)))
            self.passes += bool(running)
            while over := [request for request, tokens in running.items() if self.is_over(request, tokens)]:
                for request in over:
                    tokens = running.pop(request)
                    finished = self.is_finished(request, tokens)
                    requests.answer(request, Response([t[0] for t in tokens], [t[1] for t in tokens], finished))

    def begun(self, request: Request) -> list[Sampled]:
        """What a request goes on from, which must be what was sampled for it."""
        assert request.begun is not None
        tokens, logps = request.begun.tokens.tolist(), request.begun.logp.tolist()
        before = [self.log[request.key, position] for position in range(len(tokens))]
        assert tokens == [each[0] for each in before] and logps == [each[1] for each in before]
        return before

    def sample(self, request: Request, position: int) -> Sampled:
        assert (request.key, position) not in self.log, "nothing is sampled twice"
        last = position + 1 == self.length(request.key)
        token = min(self.policy.eos_token_ids) if last else random.Random(request.key + position).randrange(5, 9)
        # A number of its own for each, that float32 holds exactly.
        self.log[request.key, position] = token, -next(self._numbers) / 2**20, self.version
        return self.log[request.key, position]

    def is_finished(self, request: Request, tokens: list[Sampled]) -> bool:
        return len(tokens) == self.length(request.key)

    def is_over(self, request: Request, tokens: list[Sampled]) -> bool:
        return request.halted or self.is_finished(request, tokens) or len(tokens) == request.max_new_tokens
