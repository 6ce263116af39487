"""Python's garbage collector while a run is under way.

A full collection walks through everything that was ever imported, torch and transformers included: a few tenths of a
second, in the middle of some step. What is there after the first step stays for the whole run and is left out of it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def gc_pause() -> Iterator[Callable[[], None]]:
    """What it gives is called after every step; from the first time on, collections look at later objects alone.

    Where somebody else has left objects out already, theirs stay out and no more are added.
    """
    settled, mine = False, not gc.get_freeze_count()

    def settle() -> None:
        nonlocal settled
        if mine and not settled:
            gc.collect()
            gc.freeze()
            settled = True

    try:
        yield settle
    finally:
        if mine:
            gc.unfreeze()
