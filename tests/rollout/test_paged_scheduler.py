"""Who is in the batch: a device is simulated that believes nothing but the numbers and pages it is told.

Its cache holds the tokens themselves, so a page that two sequences write, or that is given away too early, is found
by reading every sequence back.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from trimtab.rollout.paged import scheduler as module
from trimtab.rollout.paged.decode_state import HOME, KEY, LIMIT, LIVE, MADE, POSITION, TOKEN
from trimtab.rollout.paged.page_allocator import Pool
from trimtab.rollout.paged.scheduler import Admission, Drawn, Group, Sample, Schedule

PAGE = 8  # a small one: every few tokens there is a border


@dataclass(frozen=True)
class Work:
    """Prompts' lengths, and after how many tokens each of their samples would end by itself."""

    prompts: list[int]
    ends: list[list[int]]
    limit: int
    stride: int
    rows: int
    spare: int  # pages beyond the fewest that a sampler has
    reading: int = 50  # tokens of prefixes that are read in one pass

    @property
    def each(self) -> int:
        """Pages of the longest sequence."""
        return -(-(max(self.prompts) + self.limit) // PAGE)

    @property
    def pages(self) -> int:
        return 2 * self.each + 2 + self.spare

    def prompt(self, number: int) -> list[int]:
        return [10_000 * (number + 1) + position for position in range(self.prompts[number])]

    def response(self, prompt: int, sample: int) -> list[int]:
        key = self.key(prompt, sample)
        return [drawn(key, made) for made in range(min(self.limit, self.ends[prompt][sample]))]

    def key(self, prompt: int, sample: int) -> int:
        return 100 * prompt + sample + 1

    def groups(self) -> list[Group]:
        return [
            group(self.prompt(number), *(Sample(number, k, self.key(number, k), []) for k in range(len(ends))))
            for number, ends in enumerate(self.ends)
        ]


def group(prefix: list[int], *samples: Sample) -> Group:
    """Samples of a prompt that have written nothing."""
    return Group(prefix, deque(replace(sample, ids=prefix) for sample in samples))


def drawn(key: int, made: int) -> int:
    return -(1000 * key + made)


@dataclass
class Device:
    """A cache of tokens, and what has been written at each home."""

    work: Work
    pages: int
    cache: npt.NDArray[np.int64] = field(init=False)
    tokens: npt.NDArray[np.int64] = field(init=False)
    shared: set[int] = field(default_factory=set)  # pages that prefixes fill: read by many, written by nobody

    def __post_init__(self) -> None:
        self.cache = np.zeros((self.pages, PAGE), dtype=np.int64)
        self.tokens = np.zeros((self.work.rows, self.work.limit), dtype=np.int64)

    def take_in(self, admission: Admission) -> None:
        for group in admission.groups:
            places = group.pages
            assert places is not None
            assert len(set(places)) == len(places) == -(-group.cached // PAGE)
            for position, token in enumerate(group.prefix[:-1]):
                self.cache[places[position // PAGE], position % PAGE] = token
            self.shared.update(places[: group.cached // PAGE])
        assert len(set(admission.copy_to)) == len(admission.copy_to) == len(admission.copy_from)
        assert not set(admission.copy_to) & {*admission.copy_from, *self.shared}
        self.cache[admission.copy_to] = self.cache[admission.copy_from]

    def last(self, numbers: npt.NDArray[np.int64], steps: int) -> npt.NDArray[np.int32]:
        """The last tokens of every row; where it has not made as many, anything."""
        columns = np.maximum(numbers[MADE, :, None] + np.arange(-steps, 0), 0)
        return self.tokens[numbers[HOME, :, None], columns].astype(np.int32)

    def step(self, numbers: npt.NDArray[np.int64], pages: npt.NDArray[np.int32]) -> None:
        """One token for every row that lives."""
        live = np.flatnonzero(numbers[LIVE])
        reading = Counter(int(page) for row in live for page in pages[row, : numbers[POSITION, row] // PAGE + 1])
        for row in live:
            position, made, home = (int(numbers[part, row]) for part in (POSITION, MADE, HOME))
            page = int(pages[row, position // PAGE])
            assert page not in self.shared, "a page of a shared prefix was written"
            assert reading[page] == 1, "a page was written that another sequence reads"
            self.cache[page, position % PAGE] = numbers[TOKEN, row]
            token = drawn(int(numbers[KEY, row]), made)
            self.tokens[home, made] = token
            prompt, sample = divmod(int(numbers[KEY, row]) - 1, 100)
            ended = made + 1 == self.work.ends[prompt][sample] or made + 1 == numbers[LIMIT, row]
            numbers[:, row] = [token, position + 1, made + 1, numbers[LIMIT, row], numbers[KEY, row], home, not ended]

    def check(self, numbers: npt.NDArray[np.int64], pages: npt.NDArray[np.int32]) -> None:
        """Every row reads its prompt and what it has written, and nothing else."""
        for row, (position, made, key) in enumerate(numbers[[POSITION, MADE, KEY]].T.tolist()):
            number, _ = divmod(key - 1, 100)
            whole = [*self.work.prompt(number), *(drawn(key, k) for k in range(made))]
            assert len(whole) == position + 1
            assert self.cache[pages[row]].ravel()[:position].tolist() == whole[:-1]
            assert numbers[TOKEN, row] == whole[-1]


class TooFewPagesError(Exception):
    """Nobody can start."""


@dataclass
class Outcome:
    samples: dict[tuple[int, int], Sample] = field(default_factory=dict)
    gave_way: list[tuple[int, int]] = field(default_factory=list)
    rounds: int = 0
    most: int = 0

    @property
    def responses(self) -> dict[tuple[int, int], list[int]]:
        assert all(sample.logp == [token / 2 for token in sample.tokens] for sample in self.samples.values())
        return {which: sample.tokens for which, sample in self.samples.items()}


def covered(schedule: Schedule, numbers: npt.NDArray[np.int64], pages: npt.NDArray[np.int32]) -> None:
    """The pages of the next steps are there, held, and no page is twice in a row."""
    for row, (position, made) in enumerate(numbers[[POSITION, MADE]].T.tolist()):
        last = position + min(schedule.steps(), schedule.limit - made) - 1
        own = pages[row, : last // PAGE + 1].tolist()
        assert len(set(own)) == len(own) == last // PAGE + 1
        assert all(schedule.pool._held[page] > 0 for page in own)


def run(work: Work, pages: int | None = None) -> Outcome:
    """All of some work on the simulated device, with everything looked at on the way."""
    pages = work.pages if pages is None else pages
    pool, device, outcome = Pool(pages), Device(work, pages), Outcome()
    schedule = Schedule(work.groups(), pool, work.rows, work.each, work.limit, work.stride)
    while schedule.queue or schedule.running:
        device.shared &= {page for page in range(pages) if pool._held[page]}
        while (admission := schedule.admit(work.reading)).started:
            device.take_in(admission)
            read = [group.cached for group in admission.groups]
            assert len(read) <= 1 or sum(read) <= work.reading
        if not schedule.running:
            raise TooFewPagesError
        schedule.grow()
        numbers, table = schedule.rows()
        assert numbers.shape[1] == len(set(numbers[HOME].tolist())) <= work.rows
        covered(schedule, numbers, table)
        device.check(numbers, table)
        steps = schedule.steps()
        for _ in range(steps):
            device.step(numbers, table)
        device.check(numbers, table)
        if outcome.rounds % 2:  # a look has to lose nothing of what was not read before it
            schedule.read()
        look(schedule, device, numbers, device.last(numbers, steps), outcome)
        outcome.rounds += 1
        outcome.most = max(outcome.most, numbers.shape[1])
    schedule.read()
    assert len(pool) == pool.pages, "pages were lost"
    return outcome


def look(
    schedule: Schedule,
    device: Device,
    numbers: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.int32],
    outcome: Outcome,
) -> None:
    ended = schedule.look(numbers, tokens, logp_of(tokens))
    for home in ended:
        sample = schedule.running[home]
        assert (sample.prompt, sample.sample) not in outcome.samples, "a sample ended twice"
        outcome.samples[sample.prompt, sample.sample] = sample
    schedule.leave(ended)
    short = schedule.short()
    oldest = next(iter(schedule.running), None)
    if schedule.pool.pages >= device.work.pages:
        assert oldest not in short, "the oldest gave way"
    assert short == list(reversed(schedule.running))[: len(short)], "the youngest give way first"
    for home in short:
        outcome.gave_way.append((schedule.running[home].prompt, schedule.running[home].sample))
        schedule.wait_again(home)


def logp_of(tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    return (tokens / 2).astype(np.float32)


@pytest.fixture(autouse=True, scope="module")
def small_pages() -> object:
    with mock.patch.object(module, "PAGE", PAGE):
        yield


@st.composite
def works(draw: Callable[..., int]) -> Work:
    limit = draw(st.integers(1, 50))
    count = draw(st.integers(1, 6))
    shortest = draw(st.sampled_from([1, limit]))  # where all are long, pages run out
    ends = [draw(st.lists(st.integers(shortest, limit + 3), min_size=1, max_size=6)) for _ in range(count)]
    return Work(
        prompts=[draw(st.integers(1, 40)) for _ in range(count)],
        ends=ends,
        limit=limit,
        stride=draw(st.integers(1, PAGE // 2)),
        rows=draw(st.integers(1, 20)),
        spare=draw(st.integers(0, 12)),
        reading=draw(st.integers(1, 100)),
    )


@settings(max_examples=250)
@given(works())
def test_every_sample_is_what_it_would_be_alone_and_no_page_is_lost(work: Work) -> None:
    outcome = run(work)
    event(f"gave way: {min(len(outcome.gave_way), 3)}")
    wanted = {(number, k): work.response(number, k) for number, ends in enumerate(work.ends) for k in range(len(ends))}
    assert outcome.responses == wanted
    assert outcome.rounds <= sum(map(len, wanted.values())), "every round brings somebody forward"


@given(works(), st.integers(1, 40))
def test_too_few_pages_are_an_error_or_slow_but_never_wrong(work: Work, pages: int) -> None:
    enough = pages >= work.pages
    with nullcontext() if enough else suppress(TooFewPagesError):
        outcome = run(work, pages)
        for (number, k), tokens in outcome.responses.items():
            assert tokens == work.response(number, k)


def test_samples_give_way_where_pages_are_few_and_go_on_where_they_were() -> None:
    work = Work([5, 9, 2, 13], [[140] * 5] * 4, limit=128, stride=3, rows=12, spare=0)
    outcome = run(work)
    assert len(outcome.gave_way) > 10
    assert max(Counter(outcome.gave_way).values()) > 1, "some give way more than once"
    assert (0, 0) not in outcome.gave_way
    assert outcome.responses == {(n, k): work.response(n, k) for n in range(4) for k in range(5)}


def test_with_pages_for_all_nobody_gives_way_and_rows_are_full() -> None:
    work = Work([5, 9, 2, 13], [[60] * 5] * 4, limit=48, stride=3, rows=12, spare=200)
    outcome = run(work)
    assert not outcome.gave_way
    assert outcome.most == 12


def test_a_row_is_given_on_as_soon_as_a_sample_ends() -> None:
    work = Work([3], [[4, 16, 4, 4, 4]], limit=16, stride=4, rows=2, spare=50)
    assert run(work).rounds == 4  # while one sample makes its 16 tokens, the other row makes four of 4


def test_samples_of_a_prompt_share_the_pages_it_fills() -> None:
    one = group(list(range(4 * PAGE + 3)), *(Sample(0, k, k, []) for k in range(3)))
    pool = Pool(50)
    schedule = Schedule([one], pool, 3, 20, limit=PAGE, stride=1)
    admission = schedule.admit(1000)
    assert admission.groups == [one]
    assert one.pages is not None
    assert len(pool) == 50 - 4 - 3, "four filled, and for each the one it ends in"
    assert admission.copy_from == one.pages[4:] * 2, "the last takes what the others had copied"
    _, table = schedule.rows()
    assert table[:, :4].tolist() == [one.pages[:4]] * 3
    assert table[:, 4].tolist() == [*admission.copy_to, one.pages[4]]
    first, *others = schedule.running
    schedule.leave(others)
    assert len(pool) == 50 - 4 - 1, "what one still reads is kept"
    schedule.leave([first])
    assert len(pool) == 50


def test_a_prompts_pages_are_kept_for_samples_that_wait() -> None:
    one = group([7] * (PAGE + 3), *(Sample(0, k, k, []) for k in range(3)))
    pool = Pool(50)
    schedule = Schedule([one], pool, 1, 20, limit=3, stride=2)
    read = []
    for k in range(3):
        admission = schedule.admit(1000)
        read += admission.groups
        assert len(admission.copy_to) == (k < 2)
        assert list(schedule.rows()[1][0, :1]) == (one.pages or [])[:1]
        schedule.leave(list(schedule.running))
        assert len(pool) == (48 if k < 2 else 50)
    assert read == [one], "it was read into the cache once"
    assert not schedule.queue


@pytest.mark.parametrize("length", [1, PAGE, PAGE + 1, PAGE + 3])
def test_a_prompt_with_one_sample_is_never_copied(length: int) -> None:
    schedule = Schedule([group([7] * length, Sample(0, 0, 1, []))], Pool(20), 1, 10, limit=PAGE, stride=4)
    assert not schedule.admit(1000).copy_to
    (one,) = schedule.running
    schedule.leave([one])
    assert len(schedule.pool) == 20


@pytest.mark.parametrize("length", [1, PAGE + 1, 2 * PAGE + 1])
def test_a_prefix_that_ends_with_a_page_is_not_copied(length: int) -> None:
    schedule = Schedule(
        [group([7] * length, Sample(0, 0, 1, []), Sample(0, 1, 2, []))], Pool(20), 2, 10, limit=3, stride=2
    )
    admission = schedule.admit(1000)
    assert not admission.copy_to
    assert len(admission.groups) == (length > 1), "a single token needs no prefill"


def test_those_that_gave_way_are_the_first_to_start_again_in_their_order() -> None:
    groups = [group([1] * 3, *(Sample(0, k, k, []) for k in range(4)))]
    schedule = Schedule(groups, Pool(50), 3, 20, limit=30, stride=1)
    schedule.admit(1000)
    numbers, _ = schedule.rows()
    numbers[[POSITION, MADE]] += 1
    assert not schedule.look(numbers, np.full((3, 1), 9, np.int32), np.zeros((3, 1), np.float32))
    for home in list(schedule.running)[:0:-1]:
        schedule.wait_again(home)
    assert [list(group.prefix) for group in schedule.queue] == [[1, 1, 1, 9]] * 2 + [[1, 1, 1]]
    assert [group.waiting[0].sample for group in schedule.queue] == [1, 2, 3]


def test_a_sample_reads_what_it_drew_and_has_not_read() -> None:
    samples = [Sample(0, k, k, [1], tokens=[5] * k, logp=[0.5] * k) for k in range(3)]
    tokens = np.array([[90, 10, 11], [20, 21, 22], [91, 92, 93]], dtype=np.int32)
    Drawn(samples, [2, 4, 2], tokens, logp_of(tokens)).read()
    assert [sample.tokens for sample in samples] == [[10, 11], [5, 20, 21, 22], [5, 5]]
    assert [sample.logp for sample in samples] == [[5, 5.5], [0.5, 10, 10.5, 11], [0.5, 0.5]]
    assert {type(token) for sample in samples for token in sample.tokens} == {int}


def test_prefixes_are_read_in_passes_of_so_many_tokens() -> None:
    groups = [group([7] * (length + 1), Sample(n, 0, n, [])) for n, length in enumerate([30, 20, 1, 0, 70, 10, 9])]
    schedule = Schedule(groups, Pool(99), 9, 20, limit=3, stride=2)
    passes = []
    while (admission := schedule.admit(50)).started:
        passes.append([group.cached for group in admission.groups])
    assert passes == [[30, 20], [1], [70], [10, 9]]
    assert len(schedule.running) == 7


def test_a_stride_longer_than_half_a_page_is_refused() -> None:
    with pytest.raises(ValueError, match="stride"):
        Schedule([], Pool(9), 1, 4, limit=30, stride=PAGE // 2 + 1)
    with pytest.raises(ValueError, match="stride"):
        Schedule([], Pool(9), 1, 4, limit=30, stride=0)


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "release"]), st.integers(0, 9)), max_size=60))
def test_a_page_is_free_when_the_last_one_lets_go(actions: list[tuple[str, int]]) -> None:
    pool = Pool(6)
    held: Counter[int] = Counter()
    for action, number in actions:
        taken = sorted(held)
        if action == "take" and number <= len(pool):
            new = pool.take(number)
            assert len(set(new)) == number
            assert not set(new) & set(held)
            held.update(new)
        elif action != "take" and taken:
            page = taken[number % len(taken)]
            (pool.share if action == "share" else pool.release)([page])
            held[page] += 1 if action == "share" else -1
            held = +held
        assert len(pool) == 6 - len(held)
        assert all(pool.alone(page) == (count == 1) for page, count in held.items())


def test_what_cannot_be_with_pages_is_found_at_once() -> None:
    pool = Pool(2)
    with pytest.raises(AssertionError, match="more pages"):
        pool.take(3)
    with pytest.raises(AssertionError, match="free page was shared"):
        pool.share([0])
    with pytest.raises(AssertionError, match="free page was released"):
        pool.release([0])
