"""The scheduler, run against a simulated device that sees only the scalars and page tables it is given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from unittest import mock

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from helpers.sampling.simulated_device import (
    PAGE_SIZE,
    TooFewPagesError,
    Work,
    logp_of,
    new_group,
    new_scheduler,
    run,
)
from helpers.thorough import THOROUGH
from trimtab.trainer.sampling.paged import scheduler as module
from trimtab.trainer.sampling.paged.buffers import PageAllocator, Scalar
from trimtab.trainer.sampling.sequence import SampledSequence


@pytest.fixture(autouse=True, scope="module")
def small_pages() -> object:
    with mock.patch.object(module, "PAGE_SIZE", PAGE_SIZE):
        yield


@st.composite
def works(draw: Callable[..., int]) -> Work:
    limit = draw(st.integers(1, 50))
    count = draw(st.integers(1, 6))
    shortest = draw(st.sampled_from([1, limit]))  # where all are long, pages run out
    lengths = [draw(st.lists(st.integers(shortest, limit + 3), min_size=1, max_size=6)) for _ in range(count)]
    return Work(
        prompts=[draw(st.integers(1, 40)) for _ in range(count)],
        lengths=lengths,
        max_new_tokens=limit,
        steps_per_sync=draw(st.integers(1, PAGE_SIZE // 2)),
        slots=draw(st.integers(1, 20)),
        spare=draw(st.integers(0, 12)),
        max_prefill_tokens=draw(st.integers(1, 100)),
        message=draw(st.sampled_from([0, 0, 3, 5, 11])),
    )


@settings(max_examples=250 if THOROUGH else 80)
@given(works())
def test_every_sample_is_what_it_would_be_alone_and_no_page_is_lost(work: Work) -> None:
    outcome = run(work)
    event(f"preempted: {min(len(outcome.preempted), 3)}")
    event(f"continued: {min(outcome.continued, 3)}, recomputed: {min(outcome.replies - outcome.continued, 3)}")
    expected = work.responses()
    assert outcome.responses == expected
    assert outcome.syncs <= sum(map(len, expected.values())), "every round generates at least one token"


@given(works(), st.integers(1, 40))
def test_too_few_pages_are_an_error_or_slow_but_never_wrong(work: Work, pages: int) -> None:
    enough = pages >= work.pages
    with nullcontext() if enough else suppress(TooFewPagesError):
        outcome = run(work, pages)
        assert outcome.responses.items() <= work.responses().items()


def test_preempted_sequences_continue_where_they_were() -> None:
    work = Work([5, 9, 2, 13], [[140] * 5] * 4, max_new_tokens=128, steps_per_sync=3, slots=12, spare=0)
    outcome = run(work)
    assert len(outcome.preempted) > 10
    assert max(Counter(outcome.preempted).values()) > 1, "some are preempted more than once"
    assert work.key(0, 0) not in outcome.preempted
    assert outcome.responses == work.responses()


@pytest.mark.parametrize("spare", [0, 300])
def test_conversations_come_back_to_their_pages_while_there_is_room(spare: int) -> None:
    work = Work([5, 9, 2, 13], [[60] * 5] * 4, max_new_tokens=48, steps_per_sync=3, slots=6, spare=spare, message=10)
    outcome = run(work)
    assert outcome.responses == work.responses()
    assert outcome.replies == 20 * 4
    assert (outcome.continued == outcome.replies) == (spare > 0)
    assert outcome.continued


def test_with_pages_for_all_none_is_preempted_and_all_slots_are_used() -> None:
    work = Work([5, 9, 2, 13], [[60] * 5] * 4, max_new_tokens=48, steps_per_sync=3, slots=12, spare=200)
    outcome = run(work)
    assert not outcome.preempted
    assert outcome.largest_batch == 12


def test_a_slot_is_reused_as_soon_as_a_sequence_finishes() -> None:
    work = Work([3], [[4, 16, 4, 4, 4]], max_new_tokens=16, steps_per_sync=4, slots=2, spare=50)
    assert run(work).syncs == 4  # while one sequence generates 16 tokens, the other slot serves four of 4


def test_samples_of_a_prompt_share_its_full_pages() -> None:
    group = new_group(list(range(4 * PAGE_SIZE + 3)), 0, 1, 2)
    scheduler = new_scheduler([group], pages=50, slots=3, max_new_tokens=PAGE_SIZE, steps_per_sync=1)
    allocator, admission = scheduler.allocator, scheduler.admit(1000)
    assert admission.prefill == [group]
    assert group.pages is not None
    assert allocator.num_free == 50 - 4 - 3, "four full pages, and one partly filled page for each sample"
    assert admission.copy_from == group.pages[4:] * 2, "the last sample takes over the page that the others copy"
    _, table = scheduler.batch()
    assert table[:, :4].tolist() == [group.pages[:4]] * 3
    assert table[:, 4].tolist() == [*admission.copy_to, group.pages[4]]
    first, *others = scheduler.running
    scheduler.release(others)
    assert allocator.num_free == 50 - 4 - 1, "pages that one sample still reads are kept"
    scheduler.release([first])
    assert allocator.num_free == 50


def test_a_prompts_pages_are_kept_for_samples_that_wait() -> None:
    group = new_group([7] * (PAGE_SIZE + 3), 0, 1, 2)
    scheduler = new_scheduler([group], pages=50, slots=1, max_new_tokens=3, steps_per_sync=2)
    prefilled = []
    for sample in range(3):
        admission = scheduler.admit(1000)
        prefilled += admission.prefill
        assert len(admission.copy_to) == (sample < 2)
        assert list(scheduler.batch()[1][0, :1]) == (group.pages or [])[:1]
        scheduler.release(list(scheduler.running))
        assert scheduler.allocator.num_free == (48 if sample < 2 else 50)
    assert prefilled == [group], "it was prefilled once"
    assert not scheduler.queue


@pytest.mark.parametrize("length", [1, PAGE_SIZE, PAGE_SIZE + 1, PAGE_SIZE + 3])
def test_a_prompt_with_one_sample_is_never_copied(length: int) -> None:
    group = new_group([7] * length, 1)
    scheduler = new_scheduler([group], pages=20, slots=1, max_new_tokens=PAGE_SIZE, steps_per_sync=4)
    assert not scheduler.admit(1000).copy_to
    scheduler.release(list(scheduler.running))
    assert scheduler.allocator.num_free == 20


@pytest.mark.parametrize("length", [1, PAGE_SIZE + 1, 2 * PAGE_SIZE + 1])
def test_a_prefix_that_fills_its_pages_is_not_copied(length: int) -> None:
    scheduler = new_scheduler([new_group([7] * length, 1, 2)], pages=20, slots=2, max_new_tokens=3, steps_per_sync=2)
    admission = scheduler.admit(1000)
    assert not admission.copy_to
    assert len(admission.prefill) == (length > 1), "a single token needs no prefill"


def test_preempted_sequences_are_first_in_the_queue_in_their_order() -> None:
    scheduler = new_scheduler([new_group([1] * 3, 0, 1, 2, 3)], pages=50, slots=3, max_new_tokens=30, steps_per_sync=1)
    scheduler.admit(1000)
    scalars, _ = scheduler.batch()
    scalars[[Scalar.POSITION, Scalar.NUM_GENERATED]] += 1
    assert not scheduler.record_outputs(scalars, np.full((3, 1), 9, np.int32), np.zeros((3, 1), np.float32))
    for slot in list(scheduler.running)[:0:-1]:
        scheduler.preempt(slot)
    assert [list(group.prefix) for group in scheduler.queue] == [[1, 1, 1, 9]] * 2 + [[1, 1, 1]]
    assert [group.waiting[0].sample for group in scheduler.queue] == [1, 2, 3]


def test_a_sequence_gets_the_tokens_that_it_does_not_have_yet() -> None:
    sequences = [SampledSequence(n, n, [1], tokens=[5] * n, logp=[0.5] * n) for n in range(3)]
    tokens = np.array([[90, 10, 11], [20, 21, 22], [91, 92, 93]], dtype=np.int32)
    scheduler = new_scheduler([], pages=9, slots=3, max_new_tokens=30, steps_per_sync=3)
    scheduler.running = dict(enumerate(sequences))
    scalars = np.zeros((len(Scalar), 3), dtype=np.int64)
    scalars[Scalar.SLOT], scalars[Scalar.NUM_GENERATED] = range(3), [2, 4, 2]
    scheduler.record_outputs(scalars, tokens, logp_of(tokens))
    for _ in range(2):  # the second time there is nothing left to append
        scheduler.append_outputs()
    assert [sequence.tokens for sequence in sequences] == [[10, 11], [5, 20, 21, 22], [5, 5]]
    assert [sequence.logp for sequence in sequences] == [[5, 5.5], [0.5, 10, 10.5, 11], [0.5, 0.5]]
    assert {type(token) for sequence in sequences for token in sequence.tokens} == {int}


def test_prefills_are_limited_to_so_many_tokens() -> None:
    groups = [new_group([7] * (length + 1), n) for n, length in enumerate([30, 20, 1, 0, 70, 10, 9])]
    scheduler = new_scheduler(groups, pages=99, slots=9, max_new_tokens=3, steps_per_sync=2)
    prefills = []
    while (admission := scheduler.admit(50)).admitted:
        prefills.append([group.num_prefilled for group in admission.prefill])
    assert prefills == [[30, 20], [1], [70], [10, 9]]
    assert len(scheduler.running) == 7


@pytest.mark.parametrize("steps", [0, PAGE_SIZE // 2 + 1])
def test_a_sync_interval_longer_than_half_a_page_is_refused(steps: int) -> None:
    with pytest.raises(ValueError, match=f"steps_per_sync={steps}: set 1 to {PAGE_SIZE // 2}"):
        new_scheduler([], pages=9, slots=1, max_new_tokens=30, steps_per_sync=steps)


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 9)), max_size=60))
def test_a_page_is_free_when_its_last_reference_is_released(actions: list[tuple[str, int]]) -> None:
    allocator = PageAllocator(6)
    expected: Counter[int] = Counter()
    for action, number in actions:
        used = sorted(expected)
        if action == "allocate" and number <= allocator.num_free:
            new = allocator.allocate(number)
            assert len(set(new)) == number
            assert not set(new) & set(expected)
            expected.update(new)
        elif action != "allocate" and used:
            page = used[number % len(used)]
            (allocator.share if action == "share" else allocator.release)([page])
            expected[page] += 1 if action == "share" else -1
            expected = +expected
        assert allocator.num_free == 6 - len(expected)
        assert [allocator.ref_count(page) for page in range(6)] == [expected[page] for page in range(6)]


def test_wrong_use_of_pages_is_noticed_at_once() -> None:
    allocator = PageAllocator(2)
    with pytest.raises(AssertionError, match="3 pages allocated, 2 free"):
        allocator.allocate(3)
    with pytest.raises(AssertionError, match="page 0 shared while free"):
        allocator.share([0])
    with pytest.raises(AssertionError, match="page 0 released while free"):
        allocator.release([0])
