"""Who brings work to a scheduler while it runs: the other side of conversations, or those who make requests."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

from trimtab.data import Request, Turns
from trimtab.trainer.sampling.paged.scheduler import Scheduler, SequenceGroup
from trimtab.trainer.sampling.request_queue import RequestQueue, ServedSequence
from trimtab.trainer.sampling.sequence import SampledSequence, waiting_for


class Side(Protocol):
    """Queues sequences between two intervals, and takes what they have sampled."""

    @property
    def is_open(self) -> bool:
        """Whether more may come although nothing runs."""
        ...

    def take(self) -> None:
        """Queue what has come; wait if nothing else is left to do."""
        ...

    def submit(self) -> None:
        """Pass on what has ended; called after `append_outputs`, while the device is busy."""
        ...

    def retire(self, finished: list[int]) -> list[int]:
        """Take sequences out of the batch, and keep their pages; return those of the `finished` slots to release."""
        ...


@dataclass
class OtherSide:
    """Passes messages from a scheduler's sequences to `turns`, and replies back."""

    turns: Turns
    scheduler: Scheduler
    eos_token_ids: frozenset[int]
    vocab_size: int
    _ended: list[SampledSequence] = field(default_factory=list)  # their messages are not submitted yet

    @property
    def is_open(self) -> bool:
        """Whether a conversation waits for its reply."""
        return bool(self.scheduler.parked)

    def retire(self, finished: list[int]) -> list[int]:
        """Park the sequences whose message ended with an end token; return the slots of the others, which are over."""
        last_token = self.scheduler.last_tokens(finished)
        ended = [slot for slot, token in zip(finished, last_token, strict=True) if token in self.eos_token_ids]
        self._ended += [self.scheduler.running[slot] for slot in ended]
        self.scheduler.park(ended)
        return [slot for slot, token in zip(finished, last_token, strict=True) if token not in self.eos_token_ids]

    def submit(self) -> None:
        """Submit the messages that have ended; call it after `append_outputs`, while the device is busy."""
        for sequence in self._ended:
            sequence.submit(self.turns)
        self._ended.clear()

    def take(self) -> None:
        """Queue the conversations whose reply has come; wait for one if nothing else is left to do."""
        idle = not (self.scheduler.queue or self.scheduler.running)
        if idle:
            self.scheduler.append_outputs()
            self.submit()
        for reply in self.turns.replies(block=idle):
            where = waiting_for(reply, self.scheduler.parked)
            (sequence,) = self.scheduler.parked[where].waiting
            goes_on = sequence.observe(reply, self.turns, self.vocab_size)
            self.scheduler.unpark(where, over=not goes_on)


@dataclass
class RequestSide:
    """Passes requests to a scheduler, and answers to those who wait for them."""

    requests: RequestQueue
    scheduler: Scheduler
    # Where the sequences of answered requests were, while others may follow them.
    _answered: WeakKeyDictionary[Request, tuple[int, int]] = field(default_factory=WeakKeyDictionary)

    @property
    def is_open(self) -> bool:
        """Whether there may be more requests."""
        return not self.requests.closed

    def take(self) -> None:
        """Queue the requests that have come, those with equal prompts together; wait if nothing else is left to do."""
        idle = not (self.scheduler.queue or self.scheduler.running)
        groups: dict[tuple[int, ...], SequenceGroup] = {}
        for sequence in self.requests.take(block=idle):
            follows = self._answered.get(sequence.request.follows) if sequence.request.follows else None
            prefix = tuple(sequence.ids)
            if follows is None and prefix in groups:
                groups[prefix].waiting.append(sequence)
                continue
            group = SequenceGroup(prefix, deque([sequence]))
            if follows is None:
                groups[prefix] = group
            self.scheduler.add(group, follows)
        self.scheduler.remove_waiting(_is_waived)

    def submit(self) -> None:
        """Do nothing: answers are given as soon as they are over, because somebody waits for each."""

    def retire(self, finished: list[int]) -> list[int]:
        """Answer the requests that are over, and keep their pages for those that follow them."""
        # Not while the next interval runs: what `request.stop` ends need not run in it, and nobody waits longer.
        self.scheduler.append_outputs()
        ends = self.requests.eos_token_ids
        # Again after some were answered: an answer may halt others.
        while over := [slot for slot, sequence in self.scheduler.running.items() if sequence.is_over(ends)]:
            sequences = [self.scheduler.running[slot] for slot in over]
            self.scheduler.keep(over)
            for sequence in sequences:
                assert isinstance(sequence, ServedSequence)
                self._answered[sequence.request] = sequence.where
                self.requests.answer(sequence)
        return []


def _is_waived(sequence: SampledSequence) -> bool:
    return isinstance(sequence, ServedSequence) and sequence.is_waived
