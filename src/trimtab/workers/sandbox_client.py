"""The client of the sandbox's fork server: gives it runs, and reads their output within limits."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import threading
import time
from dataclasses import asdict
from typing import Any

from trimtab.workers.jail import Limits
from trimtab.workers.results import Probe, Result, SandboxError, kind_of, kind_of_exit, refused, text_of
from trimtab.workers.runner import LENGTH_BYTES
from trimtab.workers.server_process import ServerProcess, package_path

START_SECONDS = 120.0  # to load the packages, on a busy machine
GRACE_SECONDS = 10.0  # beyond a deadline, before a server that does not answer is killed
_CHUNK = 1 << 16
SEARCH_PATH = "/usr/bin:/bin"  # PATH of the server and of programs
_LOST: dict[str, Any] = {"status": 9, "reason": "lost", "ms": 0.0, "failure": ""}


class SandboxClient(ServerProcess):
    """A server process, as its client sees it. Usable from many threads of the process that started it."""

    def __init__(
        self, limits: Limits, packages: tuple[str, ...], without: tuple[str, ...] = (), *, bubblewrap: bool = False
    ) -> None:
        self.lock = threading.Lock()
        options = {"limits": asdict(limits), "packages": packages, "without": without, "bubblewrap": bubblewrap}
        super().__init__(
            "trimtab.workers.sandbox_server", [json.dumps(options)], socket.SOCK_SEQPACKET,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", env=_environment(),
        )  # fmt: skip
        self.probe = Probe(**self.receive())
        self.ready = False

    def receive(self) -> dict[str, Any]:
        """Receive a message of the server's start."""
        self.requests.settimeout(START_SECONDS)
        try:
            message = self.requests.recv(_CHUNK)
        except TimeoutError:
            self.close()
            raise SandboxError(f"the sandbox's server did not start within {START_SECONDS:g} s") from None
        reply: dict[str, Any] = json.loads(message) if message else {"error": "it ended without a word"}
        if "error" in reply:
            self.close()
            raise SandboxError(f"the sandbox's server could not start: {reply['error']}")
        return reply

    def open(self, seconds: float, *, session: bool = False) -> Exchange:
        """Have the server start a process; a session has no deadline until it is given a program."""
        with self.lock:
            if not self.ready:  # the packages are being loaded
                self.receive()
                self.requests.settimeout(GRACE_SECONDS)
                self.ready = True
        return Exchange(self, seconds, session=session)


class Exchange:
    """The descriptors of one process at the client: a control socket, a channel for programs, output and error.

    The process has the other ends, so that no program and no output passes through the server's memory.
    """

    def __init__(self, server: SandboxClient, seconds: float, *, session: bool) -> None:
        self.server = server
        self.session = session
        self.control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel, channel = socket.socketpair()
        self.output, output = os.pipe()
        self.errors, errors = os.pipe()
        self.ended: dict[str, Any] | None = None  # the server's last word
        self.held: set[socket.socket | int] = {self.control, self.channel, self.output, self.errors}
        server.held |= self.held
        header = json.dumps({"seconds": seconds, "session": session}).encode()
        with control, channel:
            try:
                with server.lock:
                    socket.send_fds(server.requests, [header], [control.fileno(), channel.fileno(), output, errors])
            except OSError:
                self.ended = _LOST
        os.close(output)
        os.close(errors)
        for descriptor in (self.channel.fileno(), self.output, self.errors):
            os.set_blocking(descriptor, False)

    def run(self, code: bytes, seconds: float, max_bytes: int) -> Result:
        """Send a program and wait for its end, the deadline, or too much output."""
        if self.ended is None and self.session:
            self.tell({"seconds": seconds})
        turn = _Turn(self, code, max_bytes)
        turn.wait(turn.start + seconds + GRACE_SECONDS)
        if self.ended is None:
            self.tell({"seconds": 0})
        return turn.result(seconds)

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message to the server; if the process has ended, its last word is on the way."""
        with contextlib.suppress(OSError):
            self.control.send(json.dumps(message).encode())

    def close(self) -> None:
        """Kill the process, unless it has ended."""
        self.server.held -= self.held
        self.control.close()
        self.channel.close()
        os.close(self.output)
        os.close(self.errors)


class _Turn:
    """One program on its way through a process."""

    def __init__(self, exchange: Exchange, code: bytes, max_bytes: int) -> None:
        self.exchange, self.max_bytes = exchange, max_bytes
        self.unsent = memoryview(len(code).to_bytes(LENGTH_BYTES, "big") + code)
        self.texts = {exchange.output: bytearray(), exchange.errors: bytearray()}
        self.start = time.monotonic()
        self.exit_code: int | None = None  # of a program in a session
        self.flooded = False

    def wait(self, last: float) -> None:
        """Move bytes until the process or the session's program has ended; at `last`, kill the server."""
        exchange = self.exchange
        with selectors.PollSelector() as selector:
            selector.register(exchange.control, selectors.EVENT_READ)
            selector.register(exchange.channel, selectors.EVENT_READ | selectors.EVENT_WRITE)
            for descriptor in self.texts:
                selector.register(descriptor, selectors.EVENT_READ)
            while exchange.ended is None and self.exit_code is None:
                events = selector.select(max(0.0, last - time.monotonic()))
                if not events:
                    exchange.server.process.kill()
                    exchange.ended = _LOST
                for key, mask in events:
                    self.handle(selector, key.fd, mask)
        for descriptor in self.texts:
            self.read(descriptor)

    def handle(self, selector: selectors.BaseSelector, descriptor: int, mask: int) -> None:
        """Take what is ready on a descriptor."""
        exchange = self.exchange
        if descriptor in self.texts:
            if not self.read(descriptor):
                selector.unregister(descriptor)
        elif descriptor == exchange.control.fileno():
            try:
                message = exchange.control.recv(_CHUNK)
            except OSError:
                message = b""
            exchange.ended = json.loads(message) if message else _LOST
        elif mask & selectors.EVENT_WRITE and self.unsent:
            try:
                self.unsent = self.unsent[exchange.channel.send(self.unsent) :]
            except OSError:  # the process has ended
                self.unsent = self.unsent[:0]
        else:
            self.listen(selector)
        if not self.unsent and descriptor == exchange.channel.fileno() and mask & selectors.EVENT_WRITE:
            selector.modify(exchange.channel, selectors.EVENT_READ)

    def listen(self, selector: selectors.BaseSelector) -> None:
        """Read the exit code of a program in a session; a run closes its channel instead."""
        try:
            word = self.exchange.channel.recv(1)
        except BlockingIOError:
            return
        except OSError:
            word = b""
        if word and self.exchange.session:
            self.exit_code = word[0]
        else:
            selector.unregister(self.exchange.channel)

    def read(self, descriptor: int) -> bool:
        """Read what is there, up to the limit; return False at its end."""
        text = self.texts[descriptor]
        while True:
            try:
                chunk = os.read(descriptor, _CHUNK)
            except BlockingIOError:
                return True
            text += chunk[: self.max_bytes - len(text) + 1]
            if len(text) > self.max_bytes:
                if not self.flooded:
                    self.exchange.tell({"kill": "output"})
                self.flooded = True
                return bool(chunk)
            if not chunk:
                return False

    def result(self, seconds: float) -> Result:
        """Put the result together."""
        output, errors = (text_of(bytes(text[: self.max_bytes])) for text in self.texts.values())
        ended = self.exchange.ended
        if ended is None:
            kind, words = kind_of_exit(self.exit_code or 0)
            return Result(output, errors or words, kind, 1e3 * (time.monotonic() - self.start))
        if ended["failure"]:
            return refused(f"the sandbox could not wall in a run: {ended['failure']}")
        kind, words = kind_of(ended["status"])
        if self.flooded:
            kind, words = "output", f"killed: it printed more than {self.max_bytes:,} bytes"
        elif ended["reason"] == "timeout":
            kind, words = "timeout", f"killed: it took longer than {seconds:g} s"
        elif ended["reason"] == "memory":
            kind, words = "memory", "killed: its processes took too much memory together"
        elif ended["reason"] == "lost":
            kind, words = "killed", "killed: the sandbox's server ended"
        errors = errors or words if kind in ("exception", "memory") and not ended["reason"] else f"{errors}{words}"
        return Result(output, errors, kind, ended["ms"])


def _environment() -> dict[str, str]:
    """Return the environment of the server and of programs: nothing of this process's but the folders of libraries."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return kept | {
        "PATH": SEARCH_PATH, "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8",
        "PYTHONPATH": package_path(),
        # Sets of strings have the same order in every run, so that a program gives the same output again.
        "PYTHONHASHSEED": "0",
        # Threads cannot be forked, and a run has few.
        "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
    }  # fmt: skip
