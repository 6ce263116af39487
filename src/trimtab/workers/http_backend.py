"""A server that speaks SandboxFusion's protocol as a backend: programs run there, behind walls that are its own affair.

The protocol: POST /run_code with code, language and limits; the reply has `status` and `run_result` with status,
return code, stdout and stderr.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from trimtab.bounded_http import BoundedClient, HttpError, event_loop_thread
from trimtab.text import shown
from trimtab.workers.jail import Limits
from trimtab.workers.results import Kind, Result, SandboxError, kind_of_exit

GRACE_SECONDS = 10.0  # for the way there and back, and for a queue there
MAX_REPLY = 16 << 20  # bytes
LARGEST = 1 << 31  # of a number in a reply


class HttpServer:
    """The client of a remote server."""

    probe = None

    def __init__(self, url: str, workers: int, limits: Limits) -> None:
        if not url.startswith(("http://", "https://")):
            raise SandboxError(f"url is {url!r}; backend 'http' needs the address of a server, as http://host:8080")
        if "@" in url:
            raise SandboxError("the url contains a password, which error messages would show: leave it out")
        self.url, self.limits, self.owner = url.rstrip("/"), limits, os.getpid()
        self.stack = ExitStack()
        self.loop = self.stack.enter_context(event_loop_thread())
        self.client = BoundedClient(workers, seconds=GRACE_SECONDS, max_bytes=MAX_REPLY)

    @property
    def usable(self) -> bool:
        """Whether this process has opened it: the thread of its requests does not live through a fork."""
        return self.owner == os.getpid()

    def open(self, seconds: float, *, session: bool = False) -> HttpRun:
        """Return what sends a program; a session would need a state that the protocol does not have."""
        if session:
            raise SandboxError("SandboxFusion's protocol has no sessions; use backend 'fork' or 'bubblewrap'")
        return HttpRun(self)

    def close(self) -> None:
        """Let go of the connections."""
        if self.owner == os.getpid():
            asyncio.run_coroutine_threadsafe(self.client.aclose(), self.loop).result(GRACE_SECONDS)
            self.stack.close()


class HttpRun:
    """One program on its way to the server."""

    ended = None

    def __init__(self, server: HttpServer) -> None:
        self.server = server

    def run(self, code: bytes, seconds: float, max_bytes: int) -> Result:
        """Send a program and return its result; a server that fails is the sandbox's failure, not the program's."""
        request = {
            "code": code.decode("utf-8", "replace"), "language": "python", "stdin": "", "files": {}, "fetch_files": [],
            "compile_timeout": seconds, "run_timeout": seconds, "memory_limit_MB": self.server.limits.memory_mb,
        }  # fmt: skip
        return read_reply(
            asyncio.run_coroutine_threadsafe(self._post(request, seconds), self.server.loop).result(), max_bytes
        )

    async def _post(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        url = f"{self.server.url}/run_code"
        try:
            reply = await self.server.client.post(url, json=request, timeout=seconds + GRACE_SECONDS)
        except HttpError as error:
            raise SandboxError(f"{url}: {error}") from None
        if reply.status_code != 200:
            raise SandboxError(f"{url}: status {reply.status_code}")
        try:
            parsed = json.loads(reply.content)
        except (ValueError, RecursionError) as error:
            raise SandboxError(f"{url}: the reply is no JSON: {error}") from None
        if not isinstance(parsed, dict):
            raise SandboxError(f"{url}: the reply is a {type(parsed).__name__}, not an object")
        return parsed

    def close(self) -> None:
        """Nothing is left to end here."""


def read_reply(reply: dict[str, Any], max_bytes: int) -> Result:
    """Return the result that a reply describes; SandboxError for one that describes none."""
    run = reply.get("run_result")
    if reply.get("status") == "SandboxError" or not isinstance(run, dict):
        raise SandboxError(f"the server could not run the program: {shown(reply.get('message'), 500)}")
    stdout, stderr = (_field(run, name, str, "").encode("utf-8", "replace") for name in ("stdout", "stderr"))
    ms = 1e3 * _field(run, "execution_time", int | float, 0.0)
    kind: Kind
    if run.get("status") == "TimeLimitExceeded":
        kind, words = "timeout", "killed: it took too long"
    else:
        code: int = _field(run, "return_code", int)
        kind, words = kind_of_exit(code) if code >= 0 else ("killed", f"killed by signal {-code}")
        if kind == "exception" and b"\nMemoryError" in stderr:
            kind = "memory"
    if len(stdout) > max_bytes:
        kind, words = "output", f"it printed more than {max_bytes:,} bytes"
    text, error = (data[:max_bytes].decode("utf-8", "replace") for data in (stdout, stderr))
    return Result(text, error or words, kind, ms)


def _field(run: Mapping[str, Any], name: str, kind: Any, missing: Any = None) -> Any:
    """Return a field of a reply's `run_result`; SandboxError if it is of another kind, or no number can be so large."""
    value = run.get(name)
    value = missing if value is None else value
    number = isinstance(value, int | float)
    if not isinstance(value, kind) or isinstance(value, bool) or (number and not abs(value) < LARGEST):
        raise SandboxError(f"the server could not run the program: {name} of its reply is {shown(value)}")
    return value
