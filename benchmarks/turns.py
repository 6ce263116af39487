"""Processes that start together and measure one after the other: starting takes long, measuring must not be disturbed.

A worker is a generator function. It yields (name, figures) pairs, and calls `turn()` when it is ready to measure, which
returns what is known from the workers before it.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

Take = Callable[[str, Any], None]
Measure = Callable[[Any, Callable[[], Any]], Iterator[tuple[str, Any]]]


def failure(error: BaseException) -> dict[str, str]:
    """Return an error as a result."""
    return {"error": f"{type(error).__name__}: {str(error)[:500]}"}


@dataclass
class Worker:
    """A started process, and its end of the pipe."""

    what: Any
    pipe: Connection
    process: Any

    @classmethod
    def start(cls, measure: Measure, what: Any) -> Worker:
        """Start a process that measures `what`."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(measure, what, theirs))
        process.start()
        theirs.close()
        return cls(what, ours, process)

    def until(self, message: str, take: Take, seconds: float) -> bool:
        """Hand on what arrives until a message; False where the process failed, ended or took too long."""
        deadline = time.monotonic() + seconds
        reason = "took too long"
        while self.pipe.poll(max(0.0, deadline - time.monotonic())):
            try:
                name, figures = self.pipe.recv()
            except EOFError:
                reason = "the process ended"
                break
            if name == message:
                return True
            if name == "end":
                return False
            take(name, figures)
        take("failed", {"error": reason})
        self.process.kill()
        return False


def in_turns(
    measure: Measure,
    whats: Sequence[Any],
    taker: Callable[[Any], Take],
    known: Callable[[Any], Any],
    start_limit: float,
    turn_limit: float,
) -> None:
    """Start all, wait until they are ready, then let each measure; limits are in seconds."""
    workers = [Worker.start(measure, what) for what in whats]
    try:
        deadline = time.monotonic() + start_limit
        ready = [one for one in workers if one.until("ready", taker(one.what), deadline - time.monotonic())]
        for one in ready:
            one.pipe.send(known(one.what))
            one.until("end", taker(one.what), turn_limit)
            one.process.join(20)
    finally:
        for one in workers:
            one.process.kill()


def _work(measure: Measure, what: Any, pipe: Connection) -> None:
    def turn() -> Any:
        pipe.send(("ready", None))
        return pipe.recv()

    try:
        for name, figures in measure(what, turn):
            pipe.send((name, figures))
    except BaseException as error:  # a rival that fails is a result too
        traceback.print_exc()
        pipe.send(("failed", failure(error)))
    pipe.send(("end", None))
    pipe.close()
    os._exit(0)  # an engine's own shutdown may wait for its process group
