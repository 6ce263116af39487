"""Named moments at which a test can make the process die.

`TRIMTAB_FAILPOINT="checkpoint.rename:2"` kills the process (as `kill -9` would) the second time it passes that point.
Without the variable every point is a look-up and nothing more.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

_SEEN: Counter[str] = Counter()


def failpoint(name: str) -> None:
    """Pass a named moment; die here if that is asked for."""
    if due(name):
        die()


def due(name: str) -> bool:
    """Whether the process is to die at this passing of a moment, for moments with something left to do first."""
    wanted = os.environ.get("TRIMTAB_FAILPOINT")
    if not wanted:
        return False
    _SEEN[name] += 1
    target, _, count = wanted.partition(":")
    return target == name and _SEEN[name] == int(count)


def die() -> None:
    """As `kill -9` would have it: nothing is flushed, closed or said."""
    os.kill(os.getpid(), signal.SIGKILL)
