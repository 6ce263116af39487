"""The other side of conversations, without tools: random replies, which come late and in any order."""

from __future__ import annotations

import random
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from trimtab.data import Reply, Response


@dataclass
class RandomTurns:
    """Replies with random tokens; what it replies depends on the conversation alone, when it replies on `order`.

    A conversation ends by itself with probability `end`. A reply comes only after a random number of polls. `lengths`
    gives the fewest and the most tokens of a reply.
    """

    seed: int = 0
    order: int = 0
    end: float = 0.2
    max_delay: int = 6
    lengths: tuple[int, int] = (1, 15)
    max_turns: int = 8
    vocabulary: tuple[int, int] = (5, 211)
    messages: dict[tuple[int, int], list[list[int]]] = field(default_factory=dict)
    given: dict[tuple[int, int], list[list[int] | None]] = field(default_factory=dict)
    waited: int = 0  # how often it was asked to block
    waiting: list[tuple[int, Reply]] = field(default_factory=list)  # after how many polls, and what

    @property
    def max_observed_tokens(self) -> int:
        return self.max_turns * self.lengths[1]

    def submit(self, prompt: int, sample: int, tokens: Sequence[int]) -> None:
        where = prompt, sample
        assert len(self.messages.get(where, [])) == len(self.given.get(where, [])), "submitted before the reply"
        self.messages.setdefault(where, []).append(list(tokens))
        turn = len(self.messages[where])
        rng = random.Random(f"{self.seed} {prompt} {sample} {turn}")
        over = rng.random() < self.end or turn > self.max_turns
        reply = None if over else [rng.randrange(*self.vocabulary) for _ in range(rng.randint(*self.lengths))]
        delay = random.Random(f"{self.order} {prompt} {sample} {turn}").randint(0, self.max_delay)
        self.waiting.append((delay, Reply(prompt, sample, reply)))

    def replies(self, block: bool) -> list[Reply]:
        assert self.waiting or not block, "it blocks where nothing was submitted"
        self.waited += block
        passed = min(delay for delay, _ in self.waiting) if block else 1
        self.waiting = [(delay - passed, reply) for delay, reply in self.waiting]
        come = [reply for delay, reply in self.waiting if delay <= 0]
        self.waiting = [(delay, reply) for delay, reply in self.waiting if delay > 0]
        random.Random(f"{self.order} {len(come)}").shuffle(come)
        for reply in come:
            self.given.setdefault((reply.prompt, reply.sample), []).append(reply.tokens)
        return come

    def check(self, groups: list[list[Response]], ends: Container[int], limit: int) -> None:
        """Check that responses hold what was submitted and replied, in order, and nothing else."""
        for prompt, group in enumerate(groups):
            for sample, response in enumerate(group):
                messages = self.messages.get((prompt, sample), [])
                given = [tokens for tokens in self.given.get((prompt, sample), []) if tokens is not None]
                observed = [response.tokens[start:end].tolist() for start, end in response.observed]
                assert response.num_sampled == len(response.logp) == len(response.sampled_tokens) <= limit
                assert response.finished == (response.tokens[-1] in ends)
                cut = [] if response.finished else [response.messages[-1].tolist()]
                assert [message.tolist() for message in response.messages] == messages + cut, (
                    "a message that was cut is not submitted"
                )
                dropped = response.finished and response.num_sampled == limit  # no token is left to answer a reply
                assert observed == given or (dropped and observed == given[:-1])
        assert not self.waiting, "every reply was taken"
