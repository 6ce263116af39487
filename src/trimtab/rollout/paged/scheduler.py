"""Who is in the batch: samples wait, start as soon as a row and pages are free, and leave when they end.

A prompt's cache is made once: the pages it fills are shared by its samples, the page it ends in is copied for each but
the last, who takes it as it is. Where the pages run out, the sample that started last gives up its own; it waits again,
first in line, with all it has written as its prefix. All of this is on the host; the device is told by `numbers` and
`pages`. Between two strides it waits for the host, which therefore works on all rows at once and reads what was drawn
only later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from trimtab.rollout.paged.decode_state import HOME, KEY, LIMIT, LIVE, MADE, NUMBERS, PAGE, POSITION, TOKEN
from trimtab.rollout.paged.page_allocator import Pool


@dataclass
class Sample:
    """One response: which it is, the key of its stream, its prompt's tokens, and what has been read of it."""

    prompt: int
    sample: int
    key: int
    ids: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)


@dataclass
class Group:
    """Samples that go on from one prefix, which is in the cache once it has `pages`."""

    prefix: Sequence[int]
    waiting: deque[Sample]
    pages: list[int] | None = None

    @property
    def cached(self) -> int:
        """Tokens of the prefix that are prefilled: the last is the first to be read in a step."""
        return len(self.prefix) - 1


@dataclass(frozen=True)
class Admission:
    """What the device has to do before new rows can take part: prefixes to be read, then pages to be copied."""

    groups: list[Group] = field(default_factory=list)
    copy_from: list[int] = field(default_factory=list)
    copy_to: list[int] = field(default_factory=list)
    started: dict[int, list[int]] = field(default_factory=dict)  # the pages of each new home


@dataclass(frozen=True)
class Drawn:
    """What rows drew in a stride: their samples, how many tokens each has made in all, and the last of those."""

    samples: list[Sample]
    made: list[int]
    tokens: npt.NDArray[np.int32]  # (rows, steps)
    logps: npt.NDArray[np.float32]

    def read(self) -> None:
        """Give the samples what they do not have yet."""
        for sample, made, tokens, logps in zip(self.samples, self.made, self.tokens, self.logps, strict=True):
            first = len(tokens) - (made - len(sample.tokens))
            sample.tokens += tokens[first:].tolist()
            sample.logp += logps[first:].tolist()


class Schedule:
    """The rows of a batch, by home."""

    def __init__(self, groups: Sequence[Group], pool: Pool, rows: int, pages: int, limit: int, stride: int) -> None:
        if not 2 <= 2 * stride <= PAGE:  # with longer ones a row may need two pages at once, and one is kept for it
            raise ValueError(f"stride={stride}: say 1 to {PAGE // 2}, half of a page's tokens")
        self.pool, self.limit, self.stride = pool, limit, stride
        self.queue = deque(groups)
        self.running: dict[int, Sample] = {}  # by home, in the order in which they started
        self._free = list(range(rows - 1, -1, -1))
        self._table = np.zeros((rows, pages), dtype=np.int32)
        self._numbers = np.zeros((NUMBERS, rows), dtype=np.int64)
        self._has = np.zeros(rows, dtype=np.int64)  # how many pages each home has
        self._unread: Drawn | None = None

    def admit(self, tokens: int) -> Admission:
        """Start what there is room for, as long as its prefixes have no more than so many tokens, or it is the first.

        The device can read these while the next are started; when there is room for nobody, nothing has `started`.
        """
        made, read = Admission(), 0
        while self.queue and self._free:
            group = self.queue[0]
            read += group.cached
            if made.started and read > tokens:
                break
            self._start(group, made)
            if group.waiting:
                break
            self.queue.popleft()
        if made.started:
            self._enter(made.started)
        return made

    def _start(self, group: Group, made: Admission) -> None:
        """Give pages to a group's prefix, homes and pages to as many of its samples as there is room for."""
        filled, own = group.cached // PAGE, self._own(group)
        if group.pages is None:
            if self._spare() < filled + 1 + own:
                return
            group.pages = self.pool.take(-(-group.cached // PAGE))
            if group.cached:
                made.groups.append(group)
        shared, tail = group.pages[:filled], group.pages[filled:]
        while group.waiting and self._free and self._spare() >= own:
            sample, home = group.waiting.popleft(), self._free.pop()
            if group.waiting:
                self.pool.share(shared)
                pages = shared + self.pool.take(own)
                made.copy_from.extend(tail)
                made.copy_to.extend(pages[filled : len(group.pages)])
            else:
                pages = group.pages + self.pool.take(own - len(tail))
            self.running[home], made.started[home] = sample, pages

    def _spare(self) -> int:
        """Pages that may be taken so that everyone, the next to start too, can still be given one more."""
        return len(self.pool) - len(self.running) - 1

    def _own(self, group: Group) -> int:
        """Pages of its own that a sample needs for its first steps."""
        ahead = min(self._horizon, self.limit - len(group.waiting[0].tokens)) - 1
        return (group.cached + ahead) // PAGE + 1 - group.cached // PAGE

    def _enter(self, started: dict[int, list[int]]) -> None:
        """Note the numbers and pages of those that start."""
        homes = list(started)
        samples = [self.running[home] for home in homes]
        made = np.array([len(sample.tokens) for sample in samples])
        numbers = np.empty((NUMBERS, len(homes)), dtype=np.int64)
        numbers[TOKEN] = [(sample.tokens or sample.ids)[-1] for sample in samples]
        numbers[POSITION] = made + [len(sample.ids) - 1 for sample in samples]
        numbers[MADE], numbers[LIMIT] = made, self.limit
        numbers[KEY] = [sample.key for sample in samples]
        numbers[HOME], numbers[LIVE] = homes, 1
        self._numbers[:, homes] = numbers
        self._has[homes] = [len(pages) for pages in started.values()]
        table = np.array(list(zip_longest(*started.values(), fillvalue=0)), dtype=np.int32)
        self._table[homes, : len(table)] = table.T

    def steps(self) -> int:
        """How many steps until the device has to be asked again."""
        return int(min(self._horizon, self.limit - self._numbers[MADE, self._homes()].min()))

    @property
    def _horizon(self) -> int:
        """Steps without a look at the device: a free row is worth less while nobody waits for it."""
        return self.stride if self.queue else 2 * self.stride

    def _homes(self) -> npt.NDArray[np.int64]:
        """Those under way, in the order of the device's rows."""
        return np.fromiter(self.running, np.int64, len(self.running))

    def rows(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """The numbers and pages of what is under way, row by row."""
        homes = self._homes()
        return self._numbers[:, homes], self._table[homes]

    def look(
        self, numbers: npt.NDArray[np.int64], tokens: npt.NDArray[np.int32], logps: npt.NDArray[np.float32]
    ) -> list[int]:
        """Take note of where the rows are and of the last that they drew; the homes of those that have ended."""
        self.read()
        homes = numbers[HOME]
        self._numbers[:, homes] = numbers
        samples = [self.running[home] for home in homes.tolist()]
        self._unread = Drawn(samples, numbers[MADE].tolist(), tokens, logps)
        ended: list[int] = homes[numbers[LIVE] == 0].tolist()
        return ended

    def read(self) -> None:
        """Give the samples what they drew before the last look. There is time for it while the device runs."""
        if self._unread is not None:
            self._unread.read()
            self._unread = None

    def leave(self, homes: list[int]) -> None:
        """Take samples out of the batch."""
        self.pool.release(self._pages(homes))
        self._free.extend(homes)
        for home in homes:
            del self.running[home]

    def short(self) -> list[int]:
        """The homes that have to give way so that the others can go on: the youngest first."""
        homes, missing = self._missing()
        need, free, leaving = int(missing.sum()), len(self.pool), list[int]()
        while need > free:
            home = int(homes[-1 - len(leaving)])
            need -= int(missing[-1 - len(leaving)])
            free += sum(map(self.pool.alone, self._pages([home])))
            leaving.append(home)
        return leaving

    def wait_again(self, home: int) -> None:
        """Put a sample in front of the queue, with what it has written as part of its prefix."""
        self.read()
        sample = self.running[home]
        self.leave([home])
        self.queue.appendleft(Group([*sample.ids, *sample.tokens], deque([sample])))

    def _missing(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The homes under way, and how many pages each lacks for its next steps."""
        homes = self._homes()
        position, made = self._numbers[POSITION, homes], self._numbers[MADE, homes]
        last = position + np.minimum(self._horizon, self.limit - made) - 1
        return homes, last // PAGE + 1 - self._has[homes]

    def grow(self) -> None:
        """Give everyone the pages of the next steps."""
        homes, missing = self._missing()
        short = homes[missing > 0]  # by one page each: the horizon is no longer than a page
        self._table[short, self._has[short]] = self.pool.take(len(short))
        self._has[short] += 1

    def _pages(self, homes: list[int]) -> list[int]:
        held = np.arange(self._table.shape[1]) < self._has[homes, None]
        pages: list[int] = self._table[homes][held].tolist()
        return pages
