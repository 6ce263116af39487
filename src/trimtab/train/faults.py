"""Named moments at which a test can make the process die or a value go bad.

`TRIMTAB_FAULT="checkpoint.rename:2"` kills the process (as `kill -9` would) the second time it passes that point.
Without the variable every point is a look-up and nothing more.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

_SEEN: Counter[str] = Counter()


def point(name: str) -> bool:
    """Pass a named moment: die here if that is asked for; True where the fault is of another kind."""
    wanted = os.environ.get("TRIMTAB_FAULT")
    if not wanted:
        return False
    _SEEN[name] += 1
    target, count, *act = wanted.split(":")
    if target != name or _SEEN[name] != int(count):
        return False
    if not act:
        os.kill(os.getpid(), signal.SIGKILL)
    return True
