"""Garbage is collected during a run, and what was there before it is not walked through again."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator

import pytest

from trimtab.train.gc_pause import gc_pause


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


class Link:
    """Something that can hold itself."""

    itself: Link | None = None


def garbage() -> weakref.ref[Link]:
    link = Link()
    link.itself = link
    return weakref.ref(link)


def seconds_of_a_collection() -> float:
    start = time.thread_time()
    gc.collect()
    return time.thread_time() - start


def test_what_was_there_is_left_out_after_the_first_step() -> None:
    before = min(seconds_of_a_collection() for _ in range(3))
    with gc_pause() as settle:
        assert gc.get_freeze_count() == 0
        settle()
        frozen = gc.get_freeze_count()
        assert frozen > 10_000
        assert min(seconds_of_a_collection() for _ in range(3)) < before / 3
        kept = [Link() for _ in range(1000)]
        settle()
        assert gc.get_freeze_count() <= frozen < frozen + len(kept), "what came later is looked at"
    assert gc.get_freeze_count() == 0


def test_garbage_of_a_run_is_still_collected() -> None:
    early = garbage()
    with gc_pause() as settle:
        settle()
        assert early() is None, "what was garbage already is not kept"
        late = garbage()
        assert late() is not None
        gc.collect()
        assert late() is None


def test_what_others_left_out_stays_left_out() -> None:
    with gc_pause() as settle:
        settle()
        theirs = gc.get_freeze_count()
        with gc_pause() as inner:
            inner()
        assert gc.get_freeze_count() > theirs / 2
    gc.freeze()
    with gc_pause():
        pass
    assert gc.get_freeze_count() > theirs / 2


def test_after_a_fault_everything_is_looked_at_again() -> None:
    def fails() -> None:
        with gc_pause() as settle:
            settle()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert gc.get_freeze_count() == 0
