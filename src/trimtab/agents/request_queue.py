"""The hand-over of requests from the server's event loop to the thread that samples, and of answers back."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from contextlib import suppress

from trimtab.data import Request, Response


class RequestQueue:
    """Implements `trimtab.data.Requests`; the server's side is `submit`."""

    def __init__(self, max_tokens: int, loop: asyncio.AbstractEventLoop) -> None:
        self.max_tokens = max_tokens
        self._loop = loop
        self._changed = threading.Condition()
        self._new: list[Request] = []
        self._finished = False
        self._answered: deque[tuple[Request, Response]] = deque()
        self._told = False  # the loop will look at the answers
        self._waiting: dict[Request, asyncio.Future[Response]] = {}  # touched in the loop only

    def submit(self, request: Request) -> asyncio.Future[Response]:
        """Hand a request over, and return the future of its answer; call it in the loop."""
        future: asyncio.Future[Response] = self._loop.create_future()
        self._waiting[request] = future
        with self._changed:
            self._new.append(request)
            self._changed.notify()
        return future

    def drop(self, request: Request) -> None:
        """Say that nobody waits for a request any more; call it in the loop."""
        request.cancelled = True
        self._waiting.pop(request, None)

    def take(self, block: bool) -> list[Request] | None:
        """Return the requests that have come; with `block` wait for one. None: there will be no more."""
        if not block and not self._new and not self._finished:
            return []  # asked at every step of decoding
        with self._changed:
            while True:
                taken, self._new = [each for each in self._new if not each.cancelled], []
                if taken:
                    return taken
                if self._finished:
                    return None
                if not block:
                    return []
                self._changed.wait()

    def answer(self, request: Request, response: Response) -> None:
        """Take the answer to a request."""
        self._answered.append((request, response))
        # One call for all answers of a step: each of them wakes the loop by a system call.
        if not self._told:
            self._told = True
            with suppress(RuntimeError):  # the server has stopped
                self._loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        self._told = False
        while self._answered:
            request, response = self._answered.popleft()
            future = self._waiting.pop(request, None)
            if future is not None and not future.done():
                future.set_result(response)

    def finish(self) -> None:
        """End `take` once all requests are taken."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def begin(self) -> None:
        """Take back `finish`: there will be requests again."""
        with self._changed:
            self._finished = False
