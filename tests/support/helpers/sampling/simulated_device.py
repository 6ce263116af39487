"""A simulated device for the scheduler of the paged sampler, which sees only the scalars and page tables it is given.

Its cache holds the tokens themselves, so a page that two sequences write, or that is freed too early, is found by
reading every sequence back.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trimtab.trainer.sampling.paged.buffers import PageAllocator, Scalar
from trimtab.trainer.sampling.paged.scheduler import Admission, IntArray, Scheduler, SequenceGroup
from trimtab.trainer.sampling.sequence import SampledSequence

PAGE_SIZE = 8  # small, so that every few tokens a page is full


@dataclass(frozen=True)
class Work:
    """Prompt lengths, and after how many tokens each of their samples would sample an end token."""

    prompts: list[int]
    lengths: list[list[int]]
    max_new_tokens: int
    steps_per_sync: int
    slots: int
    spare: int  # pages beyond the fewest that a sampler allocates
    max_prefill_tokens: int = 50
    message: int = 0  # a message ends after every so many tokens, and has a reply; 0: none has

    @property
    def pages_per_slot(self) -> int:
        replies = sum(len(reply_to(n)) for n in range(self.message, self.max_new_tokens, self.message or 1))
        return -(-(max(self.prompts) + self.max_new_tokens + replies * bool(self.message)) // PAGE_SIZE)

    def ends_message(self, generated: int) -> bool:
        return bool(self.message) and generated % self.message == 0

    def with_replies(self, key: int, generated: int, replied: bool) -> list[int]:
        """The tokens of a conversation; `replied`: its newest message has its reply."""
        tokens = []
        for n in range(generated):
            tokens.append(token_of(key, n))
            if self.ends_message(n + 1) and (replied or n + 1 < generated):
                tokens += reply_to(n + 1)
        return tokens

    @property
    def pages(self) -> int:
        return 2 * self.pages_per_slot + 2 + self.spare

    def prompt(self, number: int) -> list[int]:
        return [10_000 * (number + 1) + position for position in range(self.prompts[number])]

    def total(self, key: int) -> int:
        """How many tokens a sequence samples in all."""
        prompt, sample = divmod(int(key) - 1, 100)
        return min(self.max_new_tokens, self.lengths[prompt][sample])

    def response(self, prompt: int, sample: int) -> list[int]:
        key = self.key(prompt, sample)
        return self.with_replies(key, min(self.max_new_tokens, self.lengths[prompt][sample]), replied=False)

    def key(self, prompt: int, sample: int) -> int:
        return 100 * prompt + sample + 1

    def responses(self) -> dict[int, list[int]]:
        """All responses by key."""
        which = [(prompt, sample) for prompt, lengths in enumerate(self.lengths) for sample in range(len(lengths))]
        return {self.key(prompt, sample): self.response(prompt, sample) for prompt, sample in which}

    def groups(self) -> list[SequenceGroup]:
        return [
            new_group(self.prompt(number), *(self.key(number, sample) for sample in range(len(lengths))), index=number)
            for number, lengths in enumerate(self.lengths)
        ]


def new_group(prompt: list[int], *keys: int, index: int = 0) -> SequenceGroup:
    """Samples of a prompt, by their keys, that have generated nothing yet."""
    samples = (SampledSequence(sample, key, prompt, prompt_index=index) for sample, key in enumerate(keys))
    return SequenceGroup(prompt, deque(samples))


def reply_to(generated: int) -> list[int]:
    """The reply to a message that ends after so many tokens."""
    return [-(10**6) - 100 * generated - n for n in range(1 + 7 * generated % 11)]


def token_of(key: int, generated: int) -> int:
    """The token that a sequence samples next."""
    return -(1000 * key + generated)


def new_scheduler(
    groups: list[SequenceGroup], pages: int, slots: int, max_new_tokens: int, steps_per_sync: int
) -> Scheduler:
    return Scheduler(
        groups,
        PageAllocator(pages),
        slots=slots,
        pages_per_slot=20,
        max_new_tokens=max_new_tokens,
        steps_per_sync=steps_per_sync,
    )


@dataclass
class Device:
    """A cache of tokens, and the tokens sampled in each slot."""

    work: Work
    pages: int
    cache: npt.NDArray[np.int64] = field(init=False)
    tokens: npt.NDArray[np.int64] = field(init=False)
    shared: set[int] = field(default_factory=set)  # full pages of prefixes: read by many, never written

    def __post_init__(self) -> None:
        self.cache = np.zeros((self.pages, PAGE_SIZE), dtype=np.int64)
        self.tokens = np.zeros((self.work.slots, self.work.max_new_tokens), dtype=np.int64)

    def prefill_and_copy(self, admission: Admission) -> None:
        for group in admission.prefill:
            pages = group.pages
            assert pages is not None
            assert len(set(pages)) == len(pages) == -(-group.num_prefilled // PAGE_SIZE)
            if group.num_cached:  # what was there before is still there
                kept = self.cache[pages].ravel()[: group.num_cached].tolist()
                assert kept == list(group.prefix[: group.num_cached])
            for position, token in enumerate(group.prefix[group.num_cached : -1], group.num_cached):
                assert pages[position // PAGE_SIZE] not in self.shared
                self.cache[pages[position // PAGE_SIZE], position % PAGE_SIZE] = token
            if not group.num_cached:  # else its pages are its own, but for those that are shared already
                self.shared.update(pages[: group.num_prefilled // PAGE_SIZE])
        assert len(set(admission.copy_to)) == len(admission.copy_to) == len(admission.copy_from)
        assert not set(admission.copy_to) & {*admission.copy_from, *self.shared}
        self.cache[admission.copy_to] = self.cache[admission.copy_from]

    def last_tokens(self, scalars: IntArray, steps: int) -> npt.NDArray[np.int32]:
        """The last tokens of every row; anything where it has generated fewer."""
        columns = np.maximum(scalars[Scalar.NUM_GENERATED, :, None] + np.arange(-steps, 0), 0)
        return self.tokens[scalars[Scalar.SLOT, :, None], columns].astype(np.int32)

    def step(self, scalars: IntArray, pages: npt.NDArray[np.int32]) -> None:
        """Sample one token for every active row."""
        active = np.flatnonzero(scalars[Scalar.ACTIVE])
        readers = Counter(
            int(page) for row in active for page in pages[row, : scalars[Scalar.POSITION, row] // PAGE_SIZE + 1]
        )
        for row in active:
            position, generated, slot = (
                int(scalars[n, row]) for n in (Scalar.POSITION, Scalar.NUM_GENERATED, Scalar.SLOT)
            )
            page = int(pages[row, position // PAGE_SIZE])
            assert page not in self.shared, "a page of a shared prefix was written"
            assert readers[page] == 1, "a page was written that another sequence reads"
            self.cache[page, position % PAGE_SIZE] = scalars[Scalar.LAST_TOKEN, row]
            token = token_of(int(scalars[Scalar.RNG_KEY, row]), generated)
            self.tokens[slot, generated] = token
            prompt, sample = divmod(int(scalars[Scalar.RNG_KEY, row]) - 1, 100)
            length = min(self.work.lengths[prompt][sample], scalars[Scalar.MAX_NEW_TOKENS, row])
            scalars[[Scalar.LAST_TOKEN, Scalar.POSITION, Scalar.NUM_GENERATED], row] = (
                token,
                position + 1,
                generated + 1,
            )
            scalars[Scalar.ACTIVE, row] = generated + 1 != length and not self.work.ends_message(generated + 1)

    def check(self, scalars: IntArray, pages: npt.NDArray[np.int32]) -> None:
        """Every row reads its prompt and what it has generated, and nothing else."""
        for row, (position, generated, key) in enumerate(
            scalars[[Scalar.POSITION, Scalar.NUM_GENERATED, Scalar.RNG_KEY]].T.tolist()
        ):
            number, _ = divmod(key - 1, 100)
            prompt, ends = self.work.prompt(number), self.work.ends_message(generated)
            whole = [*prompt, *self.work.with_replies(key, generated, replied=True)]
            if ends and len(whole) != position + 1:
                whole = [*prompt, *self.work.with_replies(key, generated, replied=False)]
            assert len(whole) == position + 1
            assert self.cache[pages[row]].ravel()[:position].tolist() == whole[:-1]
            assert scalars[Scalar.LAST_TOKEN, row] == whole[-1]


class NotingAllocator(PageAllocator):
    """Tells the device that a page starts anew."""

    def __init__(self, device: Device) -> None:
        super().__init__(device.pages)
        self.device = device

    def allocate(self, count: int) -> list[int]:
        pages = super().allocate(count)
        self.device.shared.difference_update(pages)
        return pages


class TooFewPagesError(Exception):
    """No sequence can be admitted."""


@dataclass
class Outcome:
    sequences: dict[int, SampledSequence] = field(default_factory=dict)  # by key
    preempted: list[int] = field(default_factory=list)
    syncs: int = 0
    continued: int = 0  # conversations that came back to pages that were kept
    replies: int = 0
    largest_batch: int = 0

    @property
    def responses(self) -> dict[int, list[int]]:
        finished = self.sequences.values()
        sampled = ([token for token in s.tokens if token > -(10**6)] for s in finished)
        assert all(s.logp == [token / 2 for token in own] for s, own in zip(finished, sampled, strict=True))
        return {key: sequence.tokens for key, sequence in self.sequences.items()}


def check_pages(scheduler: Scheduler, scalars: IntArray, pages: npt.NDArray[np.int32]) -> None:
    """Every row has the pages of the next steps, none of them free, and none twice."""
    for row, (position, generated) in enumerate(scalars[[Scalar.POSITION, Scalar.NUM_GENERATED]].T.tolist()):
        last = position + min(scheduler.steps_until_sync(), scheduler.max_new_tokens - generated) - 1
        own = pages[row, : last // PAGE_SIZE + 1].tolist()
        assert len(set(own)) == len(own) == last // PAGE_SIZE + 1
        assert all(scheduler.allocator.ref_count(page) for page in own)


def run(work: Work, pages: int | None = None) -> Outcome:
    """Run all of the work on the simulated device, with checks on the way."""
    pages = work.pages if pages is None else pages
    device, outcome = Device(work, pages), Outcome()
    allocator = NotingAllocator(device)
    scheduler = Scheduler(
        work.groups(),
        allocator,
        slots=work.slots,
        pages_per_slot=work.pages_per_slot,
        max_new_tokens=work.max_new_tokens,
        steps_per_sync=work.steps_per_sync,
        conversing=bool(work.message),
    )
    while scheduler.queue or scheduler.running or scheduler.parked:
        reply(scheduler, outcome)
        if not (scheduler.queue or scheduler.running):
            continue
        while (admission := scheduler.admit(work.max_prefill_tokens)).admitted:
            device.prefill_and_copy(admission)
            prefilled = [group.num_prefilled - group.num_cached for group in admission.prefill]
            outcome.continued += sum(group.num_cached > 0 for group in admission.prefill)
            assert len(prefilled) <= 1 or sum(prefilled) <= work.max_prefill_tokens
        if not scheduler.running:
            raise TooFewPagesError
        scheduler.allocate_pages()
        scalars, table = scheduler.batch()
        assert scalars.shape[1] == len(set(scalars[Scalar.SLOT].tolist())) <= work.slots
        check_pages(scheduler, scalars, table)
        device.check(scalars, table)
        steps = scheduler.steps_until_sync()
        for _ in range(steps):
            device.step(scalars, table)
        device.check(scalars, table)
        if outcome.syncs % 2:  # outputs that were not appended in time must not be lost
            scheduler.append_outputs()
        sync(scheduler, device, scalars, device.last_tokens(scalars, steps), outcome)
        outcome.syncs += 1
        outcome.largest_batch = max(outcome.largest_batch, scalars.shape[1])
    scheduler.append_outputs()
    assert allocator.num_free == allocator.num_pages, "pages were lost"
    return outcome


def sync(
    scheduler: Scheduler, device: Device, scalars: IntArray, tokens: npt.NDArray[np.int32], outcome: Outcome
) -> None:
    """Record what the device sampled, retire finished sequences, and preempt where pages are short."""
    finished = scheduler.record_outputs(scalars, tokens, logp_of(tokens))
    key, generated = scheduler._scalars[[Scalar.RNG_KEY, Scalar.NUM_GENERATED]]
    ended = [slot for slot in finished if generated[slot] < device.work.total(key[slot])]
    scheduler.park(ended)
    finished = [slot for slot in finished if slot not in ended]
    for slot in finished:
        sequence = scheduler.running[slot]
        assert sequence.key not in outcome.sequences, "a sequence finished twice"
        outcome.sequences[sequence.key] = sequence
    scheduler.release(finished)
    slots = scheduler.slots_to_preempt()
    oldest = next(iter(scheduler.running), None)
    if scheduler.allocator.num_pages >= device.work.pages:
        assert oldest not in slots, "the sequence admitted first was preempted"
    assert slots == list(reversed(scheduler.running))[: len(slots)], "the last admitted are preempted first"
    for slot in slots:
        outcome.preempted.append(scheduler.running[slot].key)
        scheduler.preempt(slot)


def reply(scheduler: Scheduler, outcome: Outcome) -> None:
    """Reply to some of the conversations that wait; to one at least if nothing else is left to do."""
    rng = random.Random(outcome.syncs)
    come = [where for where in scheduler.parked if rng.random() < 0.4]
    idle = not (scheduler.queue or scheduler.running)
    for where in come or list(scheduler.parked)[: int(idle)]:
        scheduler.append_outputs()
        group = scheduler.parked[where]
        outcome.replies += 1
        sequence = group.waiting[0]
        sequence.tokens += reply_to(sequence.num_sampled)
        scheduler.unpark(where, over=False)


def logp_of(tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    return (tokens / 2).astype(np.float32)
