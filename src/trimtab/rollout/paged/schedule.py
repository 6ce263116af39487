"""Who is in the batch: samples wait, start as soon as a row and pages are free, and leave when they end.

A prompt's cache is made once: the pages it fills are shared by its samples, the page it ends in is copied for each.
Where the pages run out, the sample that started last gives up its own; it waits again, first in line, with all it has
written as its prefix. All of this is on the host; the device is told by `numbers` and `pages`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trimtab.rollout.paged.pool import Pool
from trimtab.rollout.paged.state import HOME, KEY, LIMIT, LIVE, MADE, NUMBERS, PAGE, POSITION, TOKEN


@dataclass
class Sample:
    """One response: which it is, the key of its stream, and what has been brought home of it."""

    prompt: int
    sample: int
    key: int
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)


@dataclass
class Group:
    """Samples that go on from one prefix, which is in the cache once `full` and `tail` are there."""

    prefix: Sequence[int]
    waiting: deque[Sample]
    full: list[int] | None = None  # pages that the prefix, less its last token, fills
    tail: list[int] = field(default_factory=list)  # the page it ends in, if it does not end with a page

    @property
    def cached(self) -> int:
        """Tokens of the prefix that are prefilled: the last is the first to be read in a step."""
        return len(self.prefix) - 1


@dataclass(frozen=True)
class Admission:
    """What the device has to do before the new rows can take part: prefixes to be read, pages to be copied."""

    groups: list[Group]
    copy_from: list[int]
    copy_to: list[int]
    released: list[int]


class Schedule:
    """The rows of a batch, by home."""

    def __init__(self, groups: Sequence[Group], pool: Pool, rows: int, pages: int, limit: int, stride: int) -> None:
        if not 2 <= 2 * stride <= PAGE:  # with longer ones a row may need two pages at once, and one is kept for it
            raise ValueError(f"stride={stride}: say 1 to {PAGE // 2}, half of a page's tokens")
        self.pool, self.limit, self.stride = pool, limit, stride
        self.queue = deque(groups)
        self.running: dict[int, Sample] = {}  # by home, in the order in which they started
        self._prefix: dict[int, Sequence[int]] = {}
        self._free = list(range(rows - 1, -1, -1))
        self._table = np.zeros((rows, pages), dtype=np.int32)
        self._numbers = np.zeros((NUMBERS, rows), dtype=np.int64)
        self._has = np.zeros(rows, dtype=np.int64)  # how many pages each home has

    def admit(self) -> Admission:
        """Start what there is room for."""
        made = Admission([], [], [], [])
        while self.queue and self._free:
            group = self.queue[0]
            if not self._place(group, made):
                break
            while group.waiting and self._free:
                if not self._start(group, made):
                    return made
            if not group.waiting:
                made.released.extend([*(group.full or []), *group.tail])
                self.queue.popleft()
        return made

    def settle(self, admission: Admission) -> None:
        """Let go of what only had to be there until the device had copied it."""
        self.pool.release(admission.released)

    def _spare(self) -> int:
        """Pages that may be taken so that everyone, the next to start too, can still be given one more."""
        return len(self.pool) - len(self.running) - 1

    def _place(self, group: Group, made: Admission) -> bool:
        """Find pages for a group's prefix."""
        if group.full is not None:
            return True
        full, rest = divmod(group.cached, PAGE)
        if self._spare() < full + 1 + self._own(group):
            return False
        group.full, group.tail = self.pool.take(full), self.pool.take(1 if rest else 0)
        if group.cached:
            made.groups.append(group)
        return True

    def _own(self, group: Group) -> int:
        """Pages of its own that a sample needs for its first steps."""
        return (group.cached + self._ahead(len(group.waiting[0].tokens))) // PAGE + 1 - group.cached // PAGE

    def _ahead(self, made: int) -> int:
        """Positions beyond its own that a sample may write in the next steps."""
        return min(self._horizon, self.limit - made) - 1

    def _start(self, group: Group, made: Admission) -> bool:
        count = self._own(group)
        if self._spare() < count:
            return False
        assert group.full is not None
        sample, home, own = group.waiting.popleft(), self._free.pop(), self.pool.take(count)
        self.pool.share(group.full)
        if group.tail:
            made.copy_from.extend(group.tail)
            made.copy_to.append(own[0])
        pages = [*group.full, *own]
        self.running[home], self._prefix[home] = sample, group.prefix
        self._table[home, : len(pages)] = pages
        self._has[home] = len(pages)
        numbers = {TOKEN: group.prefix[-1], POSITION: group.cached, MADE: len(sample.tokens)}
        numbers |= {LIMIT: self.limit, KEY: sample.key, HOME: home, LIVE: 1}
        self._numbers[:, home] = [numbers[which] for which in range(NUMBERS)]
        return True

    def steps(self) -> int:
        """How many steps until the device has to be asked again."""
        homes = list(self.running)
        return int(min(self._horizon, (self._numbers[LIMIT, homes] - self._numbers[MADE, homes]).max()))

    @property
    def _horizon(self) -> int:
        """Steps without a look at the device: a free row is worth less while nobody waits for it."""
        return self.stride if self.queue else 2 * self.stride

    def rows(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """The numbers and pages of what is under way, row by row."""
        homes = list(self.running)
        return self._numbers[:, homes], self._table[homes]

    def look(self, numbers: npt.NDArray[np.int64]) -> list[int]:
        """Take note of where the rows are; the homes of those that have ended."""
        homes = numbers[HOME]
        self._numbers[:, homes] = numbers
        return [int(home) for home in homes[numbers[LIVE] == 0]]

    def made(self, home: int) -> int:
        """Tokens that a home's sample has made, those of earlier homes included."""
        return int(self._numbers[MADE, home])

    def leave(self, home: int) -> Sample:
        """Take a sample out of the batch."""
        self.pool.release(self._pages(home))
        del self._prefix[home]
        self._free.append(home)
        return self.running.pop(home)

    def short(self) -> list[int]:
        """The homes that have to give way so that the others can go on: the youngest first."""
        homes, missing = self._missing()
        need, free, leaving = int(missing.sum()), len(self.pool), []
        for home, own in zip(homes[::-1], missing[::-1].tolist(), strict=True):
            if need <= free:
                break
            leaving.append(home)
            need -= own
            free += sum(1 for page in self._pages(home) if self.pool.alone(page))
        return leaving

    def wait_again(self, home: int, sample: Sample) -> None:
        """Put a sample that gave way in front of the queue, with what it has written as part of its prefix."""
        prefix = [*self._prefix[home][: self._prefix_length(home)], *sample.tokens]
        self.leave(home)
        self.queue.appendleft(Group(prefix, deque([sample])))

    def _prefix_length(self, home: int) -> int:
        """The prompt's own length: a sample that has given way before has its own tokens in its prefix."""
        return int(self._numbers[POSITION, home]) + 1 - self.made(home)

    def _missing(self) -> tuple[list[int], npt.NDArray[np.int64]]:
        """The homes under way, and how many pages each lacks for its next steps."""
        homes = list(self.running)
        position, made = self._numbers[POSITION, homes], self._numbers[MADE, homes]
        last = position + np.minimum(self._horizon, self.limit - made) - 1
        return homes, last // PAGE + 1 - self._has[homes]

    def grow(self) -> None:
        """Give everyone the pages of the next steps."""
        homes, missing = self._missing()
        short = np.array(homes, dtype=np.int64)[missing > 0]  # by one page each: the horizon is no longer than a page
        self._table[short, self._has[short]] = self.pool.take(len(short))
        self._has[short] += 1

    def _pages(self, home: int) -> list[int]:
        pages: list[int] = self._table[home, : self._has[home]].tolist()
        return pages
