"""The event loop of a fork server: forks children, watches their deadlines, kills and reaps them.

`CallServer` has children that call a function, `SandboxServer` has children that run a program behind walls.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from trimtab.workers.linux import die_with_parent


@dataclass
class Child:
    """A process that the server has forked, and when it is to be looked at."""

    pid: int
    start: float
    deadline: float

    @property
    def due(self) -> float:
        """The time of the next look at it."""
        return self.deadline


C = TypeVar("C", bound=Child)


class Supervisor(Generic[C]):
    """An event loop over requests and children. It computes nothing itself, so it cannot hang."""

    def __init__(self, requests: socket.socket) -> None:
        self.requests = requests
        self.selector = selectors.DefaultSelector()
        self.running: dict[int, C] = {}  # by PID
        self.watch(requests.fileno(), self.accept)

    def accept(self) -> None:
        """Read what the client asks for; end this process when the client is gone."""
        raise NotImplementedError

    def look(self, child: C, now: float) -> None:
        """Decide about a child that is due."""
        raise NotImplementedError

    def start_waiting(self, now: float, idle: bool) -> None:
        """Fork what is to be forked; `idle`: nothing has happened since the last time."""
        raise NotImplementedError

    def next_start(self) -> float:
        """Return when something waiting can be started."""
        return math.inf

    def serve(self) -> None:
        """Serve until the client is gone."""
        while True:
            due = min((child.due for child in self.running.values()), default=math.inf)
            due = min(due, self.next_start())
            events = self.selector.select(None if due == math.inf else max(0.0, due - time.monotonic()))
            for key, _ in events:
                # What one event ends may have a second event at the same moment, which is then about nothing.
                if self.selector.get_map().get(key.fd) is key:
                    key.data()
            now = time.monotonic()
            for child in [child for child in self.running.values() if child.due <= now]:
                self.look(child, now)
            self.start_waiting(now, idle=not events)

    def watch(self, descriptor: int, handle: Callable[[], None]) -> None:
        """Call `handle` whenever a descriptor can be read."""
        self.selector.register(descriptor, selectors.EVENT_READ, handle)

    def unwatch(self, descriptor: int) -> None:
        """Stop watching a descriptor, if it is watched."""
        with contextlib.suppress(KeyError):
            self.selector.unregister(descriptor)

    def fork(self, become: Callable[[], None]) -> int:
        """Fork a child that leads a process group and runs `become`; return its PID."""
        server, pid = os.getpid(), os.fork()
        if pid == 0:
            try:
                die_with_parent(server)
                os.setpgid(0, 0)
                become()
            finally:
                os._exit(1)
        with contextlib.suppress(OSError):  # also here: it may have to be killed before it has done so itself
            os.setpgid(pid, pid)
        return pid

    def kill(self, child: C) -> None:
        """Kill a child and its process group."""
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(child.pid, signal.SIGKILL)

    def reap(self, child: C) -> int:
        """Kill what is left of a child and all that it has started, and return its wait status."""
        self.kill(child)
        self.running.pop(child.pid, None)
        return os.waitpid(child.pid, 0)[1]


def freeze_memory() -> None:
    """Keep the garbage collector from writing to pages that the children will share."""
    gc.collect()
    gc.freeze()
