"""The requests of one call of `serve`: taken when a sampler has time for them, checked, and answered."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import count

from trimtab.data import PromptTokens, Request, Requests, check_prompts
from trimtab.trainer.sampling.sequence import SampledSequence

# A sampler that has nothing to do waits for more requests after the first as long as they come within a pause, but no
# longer than the window: a forward pass for one takes about as long as one for many that are about to ask.
GATHER_PAUSE = 0.002
GATHER_WINDOW = 0.01
# Ask `request.stop` after every so many tokens: it may decode them all each time, and what is too many is cut off.
STOP_EVERY = 8


@dataclass
class ServedSequence(SampledSequence):
    """The answer to a request in the making."""

    request: Request = None  # type: ignore[assignment]
    stopped: bool = False  # by `request.stop`
    _asked: int = 0  # how many tokens `request.stop` has seen

    @property
    def is_waived(self) -> bool:
        """Whether it need not be started: nobody waits for it, or it is to go on another time."""
        return self.request.cancelled or self.request.halted

    def is_over(self, eos_token_ids: Collection[int]) -> bool:
        """Return whether no more is to be sampled, and cut off what `request.stop` says is too much."""
        if self.is_waived:
            return True
        over = super().is_over(eos_token_ids)
        if self.request.stop is not None and (over or len(self.tokens) - self._asked >= STOP_EVERY):
            self._asked = len(self.tokens)
            self._cut(self.request.stop(list(self.tokens)))
        return over or self.stopped

    def _cut(self, length: int | None) -> None:
        """Keep so many tokens, or all where it is None."""
        if length is None:
            return
        if not 1 <= length <= len(self.tokens):
            raise ValueError(f"request.stop returned {length} for {len(self.tokens)} tokens: it must keep 1 or more")
        del self.tokens[length:], self.logp[length:], self.moments[length:], self.kept[length:]
        self.stopped = True

    def is_finished(self, eos_token_ids: Collection[int]) -> bool:
        """Return whether an end token or `request.stop` has ended it."""
        return self.stopped or super().is_finished(eos_token_ids)


@dataclass
class RequestQueue:
    """Takes requests as sequences, and answers them; `closed` once there will be no more."""

    requests: Requests
    eos_token_ids: frozenset[int]
    vocab_size: int
    closed: bool = False
    _numbers: count[int] = field(default_factory=count)

    def take(self, block: bool) -> list[ServedSequence]:
        """Return the requests that have come; with `block` wait for one, and a moment for others."""
        taken = self._take(block)
        if block and taken:
            end = time.monotonic() + GATHER_WINDOW
            while not self.closed and time.monotonic() < end:
                time.sleep(GATHER_PAUSE)
                more = self._take(block=False)
                taken += more
                if not more:
                    break
        return [self._sequence(request) for request in taken if not request.cancelled]

    def _take(self, block: bool) -> list[Request]:
        if self.closed:
            return []
        taken = self.requests.take(block)
        self.closed = taken is None
        return list(taken or ())

    def _sequence(self, request: Request) -> ServedSequence:
        """Check a request; return the sequence that will be its answer."""
        check_prompts([PromptTokens(request.prompt, request.key)], self.vocab_size)
        limit = min(request.max_new_tokens, self.requests.max_tokens - len(request.prompt))
        if limit < 1:
            raise ValueError(
                f"a request of {len(request.prompt)} tokens with max_new_tokens={request.max_new_tokens}: no token may "
                f"be sampled, because prompt and answer may have {self.requests.max_tokens} together"
            )
        sequence = ServedSequence(0, request.key, request.prompt, max_new_tokens=limit, request=request)
        sequence.prompt_index = next(self._numbers)
        if request.begun is not None:
            sequence.tokens, sequence.logp = request.begun.tokens.tolist(), request.begun.logp.tolist()
        return sequence

    def answer(self, sequence: SampledSequence) -> None:
        """Answer the request of a sequence that is over, unless nobody waits for it any more."""
        assert isinstance(sequence, ServedSequence)
        if not sequence.request.cancelled:
            self.requests.answer(sequence.request, sequence.response(self.eos_token_ids))
