"""What the kernel says about processes: who descends from whom, and what could be changed about one from outside."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """One line of the process table."""

    pid: int
    name: str
    state: str
    parent: int


def processes() -> list[Process]:
    """List all processes."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                text = (folder / "stat").read_text(errors="replace")
            except OSError:  # it has ended
                continue
            name, rest = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
            found.append(Process(int(folder.name), name, rest[0], int(rest[1])))
    return found


def descendants(root: int, table: list[Process] | None = None) -> list[Process]:
    """List the processes that descend from one, without the dead ones that only wait for their parent."""
    table = table or processes()
    found: list[Process] = []
    parents = {root}
    while parents:
        children = [process for process in table if process.parent in parents]
        found += children
        parents = {process.pid for process in children}
    return [process for process in found if process.state != "Z"]


def standing(pid: int) -> dict[str, object]:
    """Return what another process may have changed: priority, processors, limits."""
    return {
        "priority": os.getpriority(os.PRIO_PROCESS, pid),
        "processors": sorted(os.sched_getaffinity(pid)),
        "limits": [resource.prlimit(pid, number) for number in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS)],
        "state": "stopped" if "\nState:\tT" in Path(f"/proc/{pid}/status").read_text() else "runs",
    }
