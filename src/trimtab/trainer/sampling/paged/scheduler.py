"""Continuous batching: admit waiting sequences when a slot and KV pages are free, and retire finished ones.

A prompt is prefilled once. Its full pages are shared by its samples; the last, partly filled page is copied for every
sample but one, which takes it over. When pages run out, the sequences admitted last are preempted: their pages are
freed, and they wait at the head of the queue to be recomputed from the prompt and what they have generated.

A conversation that waits for a reply is parked: it leaves its slot and keeps its pages, so that only the reply has to
be prefilled. Kept pages are the first to be freed when pages run out; the conversation is then recomputed. The pages of
an answered request are kept in the same way, for a request that follows it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from trimtab.trainer.sampling.paged.buffers import PAGE_SIZE, PageAllocator, Scalar
from trimtab.trainer.sampling.sequence import SampledSequence

IntArray = npt.NDArray[np.int64]


@dataclass(eq=False)
class SequenceGroup:
    """Sequences that continue the same prefix; it has `pages` once it has been admitted.

    A parked conversation is a group of its own, and `kept` are the pages of its first `num_cached` tokens.
    """

    prefix: Sequence[int]
    waiting: deque[SampledSequence]
    pages: list[int] | None = None
    kept: list[int] = field(default_factory=list)
    num_cached: int = 0

    @property
    def num_prefilled(self) -> int:
        """How many tokens are prefilled: all but the last, which is the input of the first decoding step."""
        return len(self.prefix) - 1


@dataclass(frozen=True)
class Admission:
    """What the device has to do before the admitted sequences can be decoded: prefill groups, then copy pages."""

    prefill: list[SequenceGroup] = field(default_factory=list)
    copy_from: list[int] = field(default_factory=list)
    copy_to: list[int] = field(default_factory=list)
    admitted: dict[int, list[int]] = field(default_factory=dict)  # the pages of each new slot


class Scheduler:
    """Assigns slots and pages to sequences.

    It runs on the host between two syncs with the device, which waits meanwhile. Hence arrays over all slots instead of
    objects, and token lists that are only appended to once the device is busy again (`append_outputs`).
    """

    def __init__(
        self,
        groups: Sequence[SequenceGroup],
        allocator: PageAllocator,
        *,
        slots: int,
        pages_per_slot: int,
        max_new_tokens: int,
        steps_per_sync: int,
        conversing: bool = False,
        serving: bool = False,
    ) -> None:
        # With longer intervals a row might need two pages at once, and only one per row is kept in reserve.
        if not 2 <= 2 * steps_per_sync <= PAGE_SIZE:
            raise ValueError(f"steps_per_sync={steps_per_sync}: set 1 to {PAGE_SIZE // 2}, half of the page size")
        self.allocator, self.max_new_tokens, self.steps_per_sync = allocator, max_new_tokens, steps_per_sync
        self.queue = deque(groups)
        self.conversing, self.serving = conversing, serving
        self.parked: dict[tuple[int, int], SequenceGroup] = {}  # those that wait for a reply, by prompt and sample
        self._keeping: dict[tuple[int, int], SequenceGroup] = {}  # not running, with pages; the newest last
        self.running: dict[int, SampledSequence] = {}  # by slot, in the order of admission
        self._free_slots = list(range(slots - 1, -1, -1))
        self._page_table = np.zeros((slots, pages_per_slot), dtype=np.int32)
        self._scalars = np.zeros((len(Scalar), slots), dtype=np.int64)
        self._num_pages = np.zeros(slots, dtype=np.int64)
        # By sequence: how many tokens it has generated, and the last of them with their log-probabilities.
        self._pending: Iterator[tuple[SampledSequence, int, npt.NDArray[np.int32], npt.NDArray[np.float32]]] = iter(())

    def admit(self, max_prefill_tokens: int) -> Admission:
        """Admit waiting sequences, up to so many tokens to prefill, but one group at least.

        The caller prefills them and calls again until nothing is `admitted`: the device works on one batch of prompts
        while the host prepares the next.
        """
        admission, prefill_tokens = Admission(), 0
        while self.queue and self._free_slots:
            group = self.queue[0]
            prefill_tokens += group.num_prefilled - group.num_cached
            if admission.admitted and prefill_tokens > max_prefill_tokens:
                break
            self._admit_group(group, admission)
            if group.waiting:
                break
            self.queue.popleft()
        if admission.admitted:
            self._write_rows(admission.admitted)
        return admission

    def _admit_group(self, group: SequenceGroup, admission: Admission) -> None:
        """Give pages to a group's prefix, and slots and pages to as many of its sequences as fit."""
        full, own = group.num_prefilled // PAGE_SIZE, self._own_pages(group)
        if group.pages is None:
            if not self._make_room(full + 1 + own - len(group.kept), group):
                return
            needed = -(-group.num_prefilled // PAGE_SIZE) - len(group.kept)
            group.pages = group.kept + self.allocator.allocate(needed)
            if group.kept:
                del self._keeping[group.waiting[0].where]
            if group.num_prefilled > group.num_cached:
                admission.prefill.append(group)
        shared, partial = group.pages[:full], group.pages[full:]
        while group.waiting and self._free_slots and self._make_room(own):
            sequence, slot = group.waiting.popleft(), self._free_slots.pop()
            if group.waiting:
                self.allocator.share(shared)
                pages = shared + self.allocator.allocate(own)
                admission.copy_from.extend(partial)
                admission.copy_to.extend(pages[full : len(group.pages)])
            else:  # the last one takes over the group's references and its partly filled page
                pages = group.pages + self.allocator.allocate(own - len(partial))
            self.running[slot], admission.admitted[slot] = sequence, pages

    def _make_room(self, pages: int, admitted: SequenceGroup | None = None) -> bool:
        """Return whether so many pages may be taken, if need be after freeing kept ones of others than `admitted`."""
        while self._available_pages() < pages:
            if not self._free_kept(admitted):
                return False
        return True

    def _free_kept(self, spared: SequenceGroup | None = None) -> bool:
        """Free the pages of one conversation that is not in the batch; return whether one had any."""
        # Of conversations the newest first: the others are closer to their return. Of answered requests the oldest
        # first: no request may ever follow it.
        order = iter(self._keeping.items()) if self.serving else reversed(self._keeping.items())
        found = next((where for where, group in order if group is not spared), None)
        if found is None:
            return False
        group = self._keeping.pop(found)
        self.allocator.release(group.kept)
        group.kept, group.num_cached = [], 0
        return True

    def _available_pages(self) -> int:
        """Return how many pages may be taken while one more stays free for each sequence, the next included."""
        return self.allocator.num_free - len(self.running) - 1

    def _own_pages(self, group: SequenceGroup) -> int:
        """Return how many unshared pages a sequence of a group needs until the next sync."""
        left = max(self._limit(sequence) - sequence.num_sampled for sequence in group.waiting)
        ahead = min(self._lookahead, left) - 1
        return (group.num_prefilled + ahead) // PAGE_SIZE + 1 - group.num_prefilled // PAGE_SIZE

    def _limit(self, sequence: SampledSequence) -> int:
        return min(self.max_new_tokens, sequence.max_new_tokens)

    def _write_rows(self, admitted: dict[int, list[int]]) -> None:
        """Set scalars and page table of admitted sequences."""
        slots = list(admitted)
        sequences = [self.running[slot] for slot in slots]
        generated = np.array([sequence.num_sampled for sequence in sequences])
        scalars = np.empty((len(Scalar), len(slots)), dtype=np.int64)
        scalars[Scalar.LAST_TOKEN] = [(sequence.tokens or sequence.prompt)[-1] for sequence in sequences]
        scalars[Scalar.POSITION] = [len(each.prompt) + len(each.tokens) - 1 for each in sequences]
        scalars[Scalar.NUM_GENERATED] = generated
        scalars[Scalar.MAX_NEW_TOKENS] = [self._limit(sequence) for sequence in sequences]
        scalars[Scalar.RNG_KEY] = [sequence.key for sequence in sequences]
        scalars[Scalar.SLOT], scalars[Scalar.ACTIVE] = slots, 1
        self._scalars[:, slots] = scalars
        self._num_pages[slots] = [len(pages) for pages in admitted.values()]
        table = np.array(list(zip_longest(*admitted.values(), fillvalue=0)), dtype=np.int32)
        self._page_table[slots, : len(table)] = table.T

    def steps_until_sync(self) -> int:
        """Return how many decoding steps to run before the next sync: no more than some sequence can still use."""
        slots = self._running_slots()
        left = self._scalars[Scalar.MAX_NEW_TOKENS, slots] - self._scalars[Scalar.NUM_GENERATED, slots]
        return int(min(self._lookahead, left.max()))

    @property
    def _lookahead(self) -> int:
        """Steps between two syncs: twice as many where no sequence waits for a slot to become free."""
        # Conversations come back at any time, and so do requests. And always as many: pages are reserved for the next
        # interval.
        return self.steps_per_sync if self.queue or self.conversing or self.serving else 2 * self.steps_per_sync

    def _running_slots(self) -> IntArray:
        return np.fromiter(self.running, np.int64, len(self.running))

    def batch(self) -> tuple[IntArray, npt.NDArray[np.int32]]:
        """Return scalars and page table of the running sequences, in the order of admission."""
        slots = self._running_slots()
        return self._scalars[:, slots], self._page_table[slots]

    def record_outputs(
        self, scalars: IntArray, tokens: npt.NDArray[np.int32], logps: npt.NDArray[np.float32]
    ) -> list[int]:
        """Take the rows' scalars and last tokens from the device; return the slots of finished sequences."""
        self.append_outputs()
        slots = scalars[Scalar.SLOT]
        self._scalars[:, slots] = scalars
        sequences = [self.running[slot] for slot in slots.tolist()]
        # An iterator: the rows are only split when `append_outputs` runs through it, once, while the device is busy.
        self._pending = zip(sequences, scalars[Scalar.NUM_GENERATED].tolist(), tokens, logps, strict=True)
        finished: list[int] = slots[scalars[Scalar.ACTIVE] == 0].tolist()
        return finished

    def append_outputs(self) -> None:
        """Append the recorded tokens to their sequences; call it while the device is busy."""
        for sequence, generated, tokens, logps in self._pending:
            # A sequence that finished early has fewer new tokens than there were steps; they are the last columns.
            first = len(tokens) - (generated - sequence.num_sampled)
            sequence.tokens += tokens[first:].tolist()
            sequence.logp += logps[first:].tolist()

    def release(self, slots: list[int]) -> None:
        """Remove sequences from the batch and free their slots and pages."""
        self.allocator.release(self._pages_of(slots))
        self._free_slots.extend(slots)
        for slot in slots:
            del self.running[slot]

    def last_tokens(self, slots: list[int]) -> list[int]:
        """Return the newest token of running sequences, as of the last sync."""
        tokens: list[int] = self._scalars[Scalar.LAST_TOKEN, slots].tolist()
        return tokens

    def park(self, slots: list[int]) -> None:
        """Take conversations whose message has ended out of the batch, and keep the pages of their tokens."""
        for slot in slots:
            group = self._retire(slot)
            self.parked[group.waiting[0].where] = group

    def keep(self, slots: list[int]) -> None:
        """Take answered requests out of the batch, and keep the pages of their tokens for those that follow them."""
        for slot in slots:
            self._retire(slot)

    def _retire(self, slot: int) -> SequenceGroup:
        """Take a sequence out of the batch; return it with the pages of its tokens."""
        # The newest token has no keys and values yet: the device writes them when the next is sampled.
        sequence, cached = self.running.pop(slot), int(self._scalars[Scalar.POSITION, slot])
        group = SequenceGroup((), deque([sequence]), kept=self._pages_of([slot]), num_cached=cached)
        self._crop(group, cached)
        if group.kept:
            self._keeping[sequence.where] = group
        self._free_slots.append(slot)
        return group

    def _crop(self, group: SequenceGroup, num_cached: int) -> None:
        """Release the kept pages of all but the first tokens."""
        full = -(-num_cached // PAGE_SIZE)
        self.allocator.release(group.kept[full:])
        group.kept, group.num_cached = group.kept[:full], num_cached

    def unpark(self, where: tuple[int, int], over: bool) -> None:
        """Put a parked conversation, with its reply, at the head of the queue; drop one that is over."""
        group = self.parked.pop(where)
        if not over:
            group.prefix = group.waiting[0].ids
            self.queue.appendleft(group)
        elif self._keeping.pop(where, None):
            self.allocator.release(group.kept)

    def add(self, group: SequenceGroup, follows: tuple[int, int] | None = None) -> None:
        """Queue a group; it takes over the kept pages of an answered request whose tokens its prefix begins with."""
        kept = self._keeping.pop(follows, None) if follows is not None else None
        if kept is not None:
            before = kept.waiting[0].ids
            same = len(group.waiting) == 1 and list(group.prefix[: len(before)]) == before
            # What was cut off the answer is cached too, and the last token of the prefix is not prefilled.
            self._crop(kept, min(kept.num_cached, len(before), group.num_prefilled) if same else 0)
            group.kept, group.num_cached = kept.kept, kept.num_cached
            if group.kept:
                self._keeping[group.waiting[0].where] = group
        self.queue.append(group)

    def remove_waiting(self, is_removed: Callable[[SampledSequence], bool]) -> None:
        """Remove sequences from the queue, and free the pages of groups without others."""
        for group in [group for group in self.queue if any(map(is_removed, group.waiting))]:
            where = group.waiting[0].where
            group.waiting = deque(sequence for sequence in group.waiting if not is_removed(sequence))
            if not group.waiting:
                self.queue.remove(group)
                self.allocator.release(group.kept if group.pages is None else group.pages)
                if group.pages is None:
                    self._keeping.pop(where, None)

    def slots_to_preempt(self) -> list[int]:
        """Return the slots to preempt, admitted last first, so that the others have pages until the next sync."""
        slots, missing = self._missing_pages()
        need, preempted = int(missing.sum()), list[int]()
        while need > self.allocator.num_free and self._free_kept():
            pass
        free = self.allocator.num_free
        while need > free:
            slot = int(slots[-1 - len(preempted)])
            need -= int(missing[-1 - len(preempted)])
            free += sum(self.allocator.ref_count(page) == 1 for page in self._pages_of([slot]))
            preempted.append(slot)
        return preempted

    def preempt(self, slot: int) -> None:
        """Free a sequence's slot and pages, and put it at the head of the queue to be recomputed."""
        self.append_outputs()
        sequence = self.running[slot]
        self.release([slot])
        self.queue.appendleft(SequenceGroup(sequence.ids, deque([sequence])))

    def allocate_pages(self) -> None:
        """Give every running sequence the pages it needs until the next sync."""
        slots, missing = self._missing_pages()
        growing = slots[missing > 0]  # by one page each: the lookahead is no longer than a page
        self._page_table[growing, self._num_pages[growing]] = self.allocator.allocate(len(growing))
        self._num_pages[growing] += 1

    def _missing_pages(self) -> tuple[IntArray, IntArray]:
        """Return the running slots, and how many pages each lacks until the next sync."""
        slots = self._running_slots()
        position, generated = self._scalars[Scalar.POSITION, slots], self._scalars[Scalar.NUM_GENERATED, slots]
        last = position + np.minimum(self._lookahead, self._scalars[Scalar.MAX_NEW_TOKENS, slots] - generated) - 1
        # A sequence may have more than it needs: in a group all get as many as the one with the most tokens left.
        return slots, np.maximum(last // PAGE_SIZE + 1 - self._num_pages[slots], 0)

    def _pages_of(self, slots: list[int]) -> list[int]:
        held = np.arange(self._page_table.shape[1]) < self._num_pages[slots, None]
        pages: list[int] = self._page_table[slots][held].tolist()
        return pages
