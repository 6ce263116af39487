"""Named points in the code at which a test can kill the process.

`TRIMTAB_FAILPOINT="folder.rename:2"` kills the process (as `kill -9` would) the second time it reaches that point.
Without the variable a failpoint costs one look-up in the environment.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter

REACHED: Counter[str] = Counter()  # how often each point was passed
_LOCK = threading.Lock()  # the recorder's thread passes points too


def failpoint(name: str) -> None:
    """Kill the process if this passage of the named point is the one in `TRIMTAB_FAILPOINT`."""
    if due(name):
        die()


def due(name: str) -> bool:
    """Count a passage of the named point; return whether to die, for callers that leave something half-done first."""
    wanted = os.environ.get("TRIMTAB_FAILPOINT")  # read each time: tests set it after the import
    if not wanted:
        return False
    target, _, count = wanted.partition(":")
    with _LOCK:
        REACHED[name] += 1
        return target == name and REACHED[name] == int(count)


def die() -> None:
    """Kill this process with SIGKILL: nothing is flushed, closed or printed."""
    os.kill(os.getpid(), signal.SIGKILL)  # not os._exit: the parent must see the status of a killed process
