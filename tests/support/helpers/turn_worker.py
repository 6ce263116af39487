"""A worker of `turns.py` that measures nothing. Its process imports this module, so it imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def worker(what: str, turn: Callable[[], Any]) -> Iterator[tuple[str, Any]]:
    """Yield its name before and after its turn; fail where it is called so."""
    yield "started", what
    if what == "fails early":
        raise RuntimeError("no room")
    yield "measured", [what, turn()]
    if what == "fails late":
        raise RuntimeError("too slow")
