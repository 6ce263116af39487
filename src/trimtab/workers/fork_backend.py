"""The client of the sandbox's fork server: starts it, gives it runs, and reads their output within limits."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import asdict
from typing import Any

from trimtab.worker_process import package_path
from trimtab.workers.jail import Limits
from trimtab.workers.probe import Probe
from trimtab.workers.results import Kind, Result, SandboxError, kind_of, kind_of_exit, refused, text_of
from trimtab.workers.runner import LENGTH_BYTES

START_SECONDS = 120.0  # to load the packages, on a busy machine
GRACE_SECONDS = 10.0  # beyond a deadline, before a server that does not answer is killed
_CHUNK = 1 << 16
SEARCH_PATH = "/usr/bin:/bin"  # PATH of the server and of programs


class ForkServer:
    """A server process, as its client sees it. Usable from many threads of the process that started it."""

    def __init__(
        self, limits: Limits, packages: tuple[str, ...], without: tuple[str, ...] = (), *, bubblewrap: bool = False
    ) -> None:
        self.lock = threading.Lock()
        self.descriptors: set[int] = set()  # to be closed in a forked child
        self.owner = os.getpid()
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        options = {"limits": asdict(limits), "packages": packages, "without": without}
        # -P: a `sympy.py` in the current folder must not run.
        module = ["trimtab.workers.bubblewrap", "serve"] if bubblewrap else ["trimtab.workers.server"]
        command = [sys.executable, "-P", "-m", *module, str(theirs.fileno()), json.dumps(options)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/",
            env=_environment(), pass_fds=[theirs.fileno()], start_new_session=True,
        )  # fmt: skip
        theirs.close()
        self.own(self.requests.fileno())
        self.close = weakref.finalize(self, _end, self.process, self.requests, self.owner)
        _servers.add(self)
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

    def wait_until_ready(self) -> None:
        """Wait until the packages are loaded."""
        with self.lock:
            if not self.ready:
                self.receive()
                self.requests.settimeout(GRACE_SECONDS)
                self.ready = True

    def open(self, seconds: float, *, session: bool = False) -> Exchange:
        """Have the server start a process; a session has no deadline until it is given a program."""
        self.wait_until_ready()
        return Exchange(self, seconds, session=session)

    @property
    def usable(self) -> bool:
        """Whether the server runs and was started by this process."""
        return self.owner == os.getpid() and self.process.poll() is None

    def own(self, *descriptors: int) -> None:
        """Note descriptors that a forked child must close, since they keep the server or a run alive."""
        self.descriptors.update(descriptors)

    def after_fork(self) -> None:
        """In a forked child: let go of the parent's server."""
        for descriptor in self.descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self.requests.detach()
        self.descriptors.clear()
        self.process.returncode = 0  # so that Popen does not wait for a process that is not ours


def _end(process: subprocess.Popen[bytes], requests: socket.socket, owner: int) -> None:
    """End a server, and with it all its runs."""
    if owner != os.getpid():
        return
    requests.close()
    try:
        process.wait(2)
    except subprocess.TimeoutExpired:
        process.kill()  # the kernel kills the rest with it
        process.wait()


class Exchange:
    """The descriptors of one process at the client: a control socket, a channel for programs, output and error."""

    def __init__(self, server: ForkServer, seconds: float, *, session: bool) -> None:
        self.server = server
        self.session = session
        self.control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel, channel = socket.socketpair()
        self.output, output = os.pipe()
        self.errors, errors = os.pipe()
        self.ended: dict[str, Any] | None = None  # the server's last word
        server.own(*self.fds())
        header = json.dumps({"seconds": seconds, "session": session}).encode()
        try:
            with server.lock:
                socket.send_fds(server.requests, [header], [control.fileno(), channel.fileno(), output, errors])
        except OSError:
            self.ended = _LOST
        finally:
            control.close()
            channel.close()
            os.close(output)
            os.close(errors)
        self.channel.setblocking(False)
        for descriptor in (self.output, self.errors):
            os.set_blocking(descriptor, False)

    def fds(self) -> tuple[int, int, int, int]:
        """Return the descriptors of this side."""
        return self.control.fileno(), self.channel.fileno(), self.output, self.errors

    def run(self, code: bytes, seconds: float, max_bytes: int) -> Result:
        """Send a program and wait for its end, the deadline, or too much output."""
        if self.ended is None and self.session:
            self.tell({"seconds": seconds})
        return _Turn(self, code, seconds, max_bytes).wait()

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message to the server; if the process has ended, its last word is on the way."""
        with contextlib.suppress(OSError):
            self.control.send(json.dumps(message).encode())

    def close(self) -> None:
        """Kill the process, unless it has ended."""
        self.server.descriptors.difference_update(self.fds())
        self.control.close()
        self.channel.close()
        os.close(self.output)
        os.close(self.errors)


_LOST: dict[str, Any] = {"status": 9, "reason": "lost", "ms": 0.0, "failure": ""}


class _Turn:
    """One program on its way through a process."""

    def __init__(self, exchange: Exchange, code: bytes, seconds: float, max_bytes: int) -> None:
        self.exchange, self.seconds, self.max_bytes = exchange, seconds, max_bytes
        self.unsent = memoryview(len(code).to_bytes(LENGTH_BYTES, "big") + code)
        self.texts = {exchange.output: bytearray(), exchange.errors: bytearray()}
        self.start = time.monotonic()
        self.exit_code: int | None = None  # of a program in a session
        self.flooded = False

    def wait(self) -> Result:
        """Move bytes until there is a result."""
        exchange = self.exchange
        with selectors.PollSelector() as selector:
            selector.register(exchange.control, selectors.EVENT_READ)
            selector.register(exchange.channel, selectors.EVENT_READ | selectors.EVENT_WRITE)
            for descriptor in self.texts:
                selector.register(descriptor, selectors.EVENT_READ)
            last = self.start + self.seconds + GRACE_SECONDS
            while exchange.ended is None and self.exit_code is None:
                events = selector.select(max(0.0, last - time.monotonic()))
                if not events:
                    exchange.server.process.kill()
                    exchange.ended = _LOST
                for key, mask in events:
                    self.handle(selector, key.fd, mask)
        for descriptor in self.texts:
            self.read(descriptor)
        if exchange.ended is None:
            exchange.tell({"seconds": 0})
        return self.result()

    def handle(self, selector: selectors.BaseSelector, descriptor: int, mask: int) -> None:
        """Take what is ready on a descriptor."""
        exchange = self.exchange
        if descriptor in self.texts:
            if not self.read(descriptor):
                selector.unregister(descriptor)
        elif descriptor == exchange.control.fileno():
            exchange.ended = _last_word(exchange.control)
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

    def result(self) -> Result:
        """Put the result together."""
        output, errors = (text_of(bytes(text[: self.max_bytes])) for text in self.texts.values())
        kind: Kind
        if self.exchange.ended is None:
            kind, words = kind_of_exit(self.exit_code or 0)
            ms = 1e3 * (time.monotonic() - self.start)
            return Result(output, errors or words, kind, ms)
        ended = self.exchange.ended
        if ended["failure"]:
            return refused(f"the sandbox could not wall in a run: {ended['failure']}")
        kind, words = kind_of(ended["status"])
        if self.flooded:
            kind, words = "output", f"killed: it printed more than {self.max_bytes:,} bytes"
        elif ended["reason"] == "timeout":
            kind, words = "timeout", f"killed: it took longer than {self.seconds:g} s"
        elif ended["reason"] == "memory":
            kind, words = "memory", "killed: its processes took too much memory together"
        elif ended["reason"] == "lost":
            kind, words = "killed", "killed: the sandbox's server ended"
        errors = errors or words if kind in ("exception", "memory") and not ended["reason"] else f"{errors}{words}"
        return Result(output, errors, kind, ended["ms"])


def _last_word(control: socket.socket) -> dict[str, Any]:
    """Return what the server says of a process that has ended."""
    try:
        message = control.recv(_CHUNK)
    except OSError:
        message = b""
    word: dict[str, Any] = json.loads(message) if message else _LOST
    return word


def _environment() -> dict[str, str]:
    """Return the environment of the server and of programs: nothing of this process's but where libraries lie."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return kept | {
        "PATH": SEARCH_PATH, "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8",
        "PYTHONPATH": os.pathsep.join(package_path()),
        # Sets of strings have the same order in every run, so that a program gives the same output again.
        "PYTHONHASHSEED": "0",
        # Threads cannot be forked, and a run has few.
        "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
    }  # fmt: skip


_servers: weakref.WeakSet[ForkServer] = weakref.WeakSet()


def _after_fork() -> None:
    for server in list(_servers):
        server.after_fork()
    _servers.clear()


os.register_at_fork(after_in_child=_after_fork)
