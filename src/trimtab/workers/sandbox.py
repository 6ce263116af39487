"""`Sandbox`: runs programs that a model wrote, many at once, each behind its own walls."""

from __future__ import annotations

import json
import math
import os
import threading
from dataclasses import asdict
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Literal, Self

from trimtab.text import printable
from trimtab.workers.jail import Limits
from trimtab.workers.results import KILLED_KINDS, LEVELS, Probe, Result, SandboxError, refused
from trimtab.workers.sandbox_client import Exchange, SandboxClient

MAX_PROGRAM = 1 << 20  # bytes
EXIT_CODES = {"ok": 0, "exception": 1, "refused": 2} | dict.fromkeys(KILLED_KINDS, 3)
Backend = Literal["fork", "bubblewrap", "http"]

if TYPE_CHECKING:
    from trimtab.workers.http_backend import HttpRun, HttpServer

    Server = SandboxClient | HttpServer
    Running = Exchange | HttpRun


class Sandbox:
    """Runs programs in processes that see an interpreter, an empty folder, and nothing else.

    `level` is the lowest level that is accepted (docs/sandbox.md); on a machine that offers less, `SandboxError` says
    what is missing. At most `workers` programs run at once, further calls wait. It can be used from many threads, goes
    on working in a forked child (which starts its own server), and can be pickled into another process.
    """

    def __init__(
        self,
        *,
        workers: int | None = None,
        level: str = "full",
        memory_mb: int = 512,
        disk_mb: int = 64,
        processes: int = 32,
        output_bytes: int = 65_536,
        packages: tuple[str, ...] = ("numpy", "sympy"),
        backend: Backend = "fork",
        url: str = "",
    ) -> None:
        self.workers = workers or os.cpu_count() or 1
        _check_positive(workers=self.workers, memory_mb=memory_mb, disk_mb=disk_mb, processes=processes)
        _check_positive(output_bytes=output_bytes)
        if level not in LEVELS:
            raise SandboxError(f"level is {level!r}; it must be one of {', '.join(LEVELS)}")
        self.level = level
        self.limits = Limits(memory_mb, disk_mb, processes)
        self.output_bytes = output_bytes
        self.packages = tuple(packages)
        self.backend = backend
        self.url = url
        self._prepare()
        self.server()

    def _prepare(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(self.workers)
        self._server: Server | None = None
        self._closed = False

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._prepare()

    def server(self) -> Server:
        """Return this process's server; a new one if the last has ended or belongs to the parent."""
        if self._owner != os.getpid():  # locks may have been held by threads that the fork left behind
            self._prepare()
        with self._lock:
            if self._closed:
                raise SandboxError("the sandbox is closed")
            if self._server is None or not self._server.usable:
                if self._server is not None:
                    self._server.close()
                    self._server = None
                server = self._start()
                try:
                    if server.probe is not None:
                        server.probe.require(self.level)
                except SandboxError:
                    server.close()
                    raise
                self._server = server
            return self._server

    def _start(self) -> Server:
        if self.backend in ("fork", "bubblewrap"):
            return SandboxClient(self.limits, self.packages, bubblewrap=self.backend == "bubblewrap")
        if self.backend == "http":
            from trimtab.workers.http_backend import HttpServer  # the others need no asyncio

            return HttpServer(self.url, self.workers, self.limits)
        raise SandboxError(f"backend is {self.backend!r}; it must be one of fork, bubblewrap, http")

    @property
    def probe(self) -> Probe | None:
        """What holds on this machine; None if programs run on another."""
        return self.server().probe

    def run(self, code: str, *, timeout: float = 10.0) -> Result:
        """Run a program and return what it printed and how it ended. Nothing of it is left afterwards."""
        program, problem = _check_program(code, timeout)
        if problem:
            return refused(problem)
        with self._slot():
            running = self.server().open(timeout)
            try:
                return running.run(program, timeout, self.output_bytes)
            finally:
                running.close()

    def session(self, *, timeout: float = 10.0) -> Session:
        """Start an interpreter that keeps its names from one program to the next; `timeout` holds for each."""
        _, problem = _check_program("", timeout)
        if problem:
            raise SandboxError(problem)
        return Session(self, self.server().open(0.0, session=True), timeout)

    def _slot(self) -> threading.BoundedSemaphore:
        if self._owner != os.getpid():
            self.server()
        return self._slots

    def close(self) -> None:
        """End the server and all that runs."""
        if self._owner != os.getpid():
            return
        with self._lock:
            self._closed = True
            if self._server is not None:
                self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Session:
    """An interpreter that lives through a conversation. It is for one thread at a time."""

    def __init__(self, sandbox: Sandbox, running: Running, timeout: float) -> None:
        self.sandbox, self.timeout = sandbox, timeout
        self._running: Running | None = running
        self._owner = os.getpid()
        self._why = "the session is closed"

    def run(self, code: str, *, timeout: float | None = None) -> Result:
        """Run a program with the names that earlier ones have left; one that is killed ends the session."""
        seconds = self.timeout if timeout is None else timeout
        program, problem = _check_program(code, seconds)
        if self._owner != os.getpid():
            problem = "the session belongs to the process that has forked this one; open a new one"
        elif self._running is None:
            problem = self._why
        if problem or self._running is None:
            return refused(problem)
        with self.sandbox._slot():
            result = self._running.run(program, seconds, self.sandbox.output_bytes)
        if self._running.ended is not None:
            self.close()
            self._why = f"the session has ended with an earlier program ({result.kind}); open a new one"
        return result

    @property
    def ended(self) -> bool:
        """Whether the interpreter is gone: closed, or killed with an earlier program."""
        return self._running is None

    def close(self) -> None:
        """End the interpreter."""
        if self._running is not None and self._owner == os.getpid():
            self._running.close()
        self._running = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SandboxError(f"{name} is {value!r}; it must be a whole number of at least 1")


def _check_program(code: str, timeout: float) -> tuple[bytes, str]:
    """Return a program's bytes, and why it is refused."""
    if not (isinstance(timeout, int | float) and 0 < timeout < math.inf):
        return b"", f"timeout is {timeout!r}; it must be a number of seconds above 0"
    program = code.encode("utf-8", "surrogatepass")
    if len(program) > MAX_PROGRAM:
        return b"", f"the program has {len(program):,} bytes, more than {MAX_PROGRAM:,}"
    return program, ""


def probe_lines() -> list[str]:
    """Say what holds on this machine and, for each layer that does not, why and how to get it."""
    with Sandbox(level="limits", workers=1) as sandbox:
        assert sandbox.probe is not None
        return [sandbox.probe.line(), *(f"missing: {text}" for text in sandbox.probe.missing())]


def run_input(
    source: IO[bytes], out: IO[str], errors: IO[str], timeout: float, *, as_json: bool, **options: Any
) -> int:
    """Run a program, print what it printed, and return the command's exit code."""
    try:
        code = source.read(MAX_PROGRAM + 1).decode()
    except UnicodeDecodeError as error:
        raise SandboxError(f"the program is not UTF-8: {error}") from None
    with Sandbox(**options) as sandbox:
        result = sandbox.run(code, timeout=timeout)
    if as_json:
        out.write(json.dumps(asdict(result)) + "\n")
    else:
        # Escape sequences are shown and not obeyed; tabs are harmless, and tables are made of them.
        for stream, text in ((out, result.stdout), (errors, result.error)):
            shown = "\t".join(map(printable, text.split("\t")))
            stream.write(shown if not shown or shown.endswith("\n") else shown + "\n")
    out.flush()
    return EXIT_CODES[result.kind]
