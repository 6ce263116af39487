"""Conversations of the paged sampler: submits the messages that have ended, and takes replies between two syncs."""

from __future__ import annotations

from dataclasses import dataclass, field

from trimtab.data import Turns
from trimtab.trainer.sampling.paged.scheduler import Scheduler
from trimtab.trainer.sampling.sequence import SampledSequence, waiting_for


@dataclass
class OtherSide:
    """Passes messages from a scheduler's sequences to `turns`, and replies back."""

    turns: Turns
    scheduler: Scheduler
    eos_token_ids: frozenset[int]
    vocab_size: int
    _ended: list[SampledSequence] = field(default_factory=list)  # their messages are not submitted yet

    def park(self, finished: list[int]) -> list[int]:
        """Park the sequences whose message ended with an end token; return the slots of the others, which are over."""
        last_token = self.scheduler.last_tokens(finished)
        ended = [slot for slot, token in zip(finished, last_token, strict=True) if token in self.eos_token_ids]
        self._ended += [self.scheduler.running[slot] for slot in ended]
        self.scheduler.park(ended)
        return [slot for slot, token in zip(finished, last_token, strict=True) if token not in self.eos_token_ids]

    def submit_messages(self) -> None:
        """Submit the messages that have ended; call it after `append_outputs`, while the device is busy."""
        for sequence in self._ended:
            sequence.submit(self.turns)
        self._ended.clear()

    def take_replies(self) -> None:
        """Queue the conversations whose reply has come; wait for one if nothing else is left to do."""
        idle = not (self.scheduler.queue or self.scheduler.running)
        if idle:
            self.scheduler.append_outputs()
            self.submit_messages()
        for reply in self.turns.replies(block=idle):
            where = waiting_for(reply, self.scheduler.parked)
            (sequence,) = self.scheduler.parked[where].waiting
            goes_on = sequence.observe(reply, self.turns, self.scheduler.max_new_tokens, self.vocab_size)
            self.scheduler.unpark(where, over=not goes_on)
