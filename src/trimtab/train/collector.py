"""Python's garbage collector while a run is under way.

A full collection walks through everything that was ever imported, torch and transformers included: a few tenths of a
second, in the middle of some step. What is there after the first step stays for the whole run and is left out of it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def light_collections() -> Iterator[Callable[[], None]]:
    """What it gives is called after every step; from the first time on, collections look at later objects alone."""
    settled = False

    def settle() -> None:
        nonlocal settled
        if not settled:
            gc.collect()
            gc.freeze()
            settled = True

    try:
        yield settle
    finally:
        gc.unfreeze()
