"""Commands of trimtab in processes of their own, to be signalled and killed: how they ended and what they left."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from helpers.hostile import command_starter
from helpers.hostile.command_starter import Order

HANG = 300.0  # seconds after which a command hangs, on a machine that does much else
LEAVE = 60.0  # seconds that the processes of a command that has ended may take to end


@dataclass
class Command:
    """A command that was started."""

    order: Order

    @property
    def folder(self) -> Path:
        return Path(self.order.folder)

    @property
    def pid(self) -> int:
        self.wait_for_file("pid")
        return int((self.folder / "pid").read_text())

    @property
    def output(self) -> str:
        """What it has printed on standard output and error, where these are files."""
        path = self.folder / "output"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def ended(self) -> bool:
        return (self.folder / "code").exists()

    @property
    def reached(self) -> bool:
        """Whether it came to its failpoint."""
        return (self.folder / "reached").exists()

    def code(self) -> int:
        """Wait until it has ended and return its exit code; minus a signal's number if that ended it."""
        self.wait_for_file("code")
        return int((self.folder / "code").read_text())

    def wait_for_file(self, name: str) -> None:
        limit = time.monotonic() + HANG
        while not (self.folder / name).exists():
            if time.monotonic() > limit:
                self.kill_all()
                raise AssertionError(f"{name}: it hangs\n{self.output[-2000:]}")
            time.sleep(0.01)

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds while the command runs."""
        limit = time.monotonic() + HANG
        while not condition():
            if self.ended and not condition():
                raise AssertionError(f"it ended with {self.code()} before\n{self.output[-2000:]}")
            if time.monotonic() > limit:
                self.kill_all()
                raise AssertionError(f"it never comes true\n{self.output[-2000:]}")
            time.sleep(0.002)

    def signal(self, *names: str, group: bool = False) -> None:
        """Send it signals, or to its process group."""
        for name in names:
            with suppress(ProcessLookupError):
                (os.killpg if group else os.kill)(self.pid, signal.Signals[name])

    def children(self) -> list[int]:
        """The processes under it, children's children too, in the order in which they were started."""
        return descendants(self.pid)

    def left(self) -> list[str]:
        """Wait until every process that it started has ended; return the command lines of those that do not."""
        limit = time.monotonic() + LEAVE
        while time.monotonic() < limit:
            if (self.folder / "gone").exists():
                return []
            time.sleep(0.01)
        lines = [command_line(pid) for pid in descendants(self.guard)]
        self.kill_all()
        return lines

    @property
    def guard(self) -> int:
        self.wait_for_file("guard")
        return int((self.folder / "guard").read_text())

    def kill_all(self) -> None:
        """Kill what is left of it, so that no test disturbs another."""
        for pid in descendants(self.guard):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Return the processes under one, those that have ended and were not waited for left out."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(entry.name)] = int(parent)
    found = [pid]
    for each in found:
        found += sorted(child for child, parent in parents.items() if parent == each)
    return found[1:]


def command_line(pid: int) -> str:
    """Return the words that started a process."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


class Starter:
    """Starts commands, in folders of their own under `root`."""

    def __init__(self, root: Path) -> None:
        self.root, self.count = root, 0
        root.mkdir(parents=True, exist_ok=True)
        source = Path(__file__).parents[4] / "src"
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYTEST", "TRIMTAB"))}
        here = {"PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", command_starter.__file__], env={**kept, **here}, stdin=subprocess.PIPE, text=True
        )

    def start(self, words: Sequence[object], cwd: Path, **how: Any) -> Command:
        """Start a command; `how` are fields of its order. Its output goes to a file unless they say where."""
        self.count += 1
        folder = self.root / str(self.count)
        folder.mkdir()
        output = str(folder / "output")
        how = {"stdout": output, "stderr": output, **how}
        order = Order([str(word) for word in words], str(folder), str(cwd), **how)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asdict(order)) + "\n")
        self.process.stdin.flush()
        return Command(order)

    def close(self) -> None:
        """End the process that starts them."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


class Terminal:
    """A terminal that a command opens at `path`; what is shown on it is kept."""

    def __init__(self) -> None:
        self.keyboard, self.screen = os.openpty()
        self.path = os.ttyname(self.screen)
        self.shown = b""
        self._closed = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def type(self, keys: bytes) -> None:
        """Press keys, such as Ctrl-C."""
        os.write(self.keyboard, keys)

    def close(self) -> None:
        """Hang up: the kernel sends SIGHUP, and writing to the terminal is an error from now on."""
        if not self._closed.is_set():
            self._closed.set()
            self._reader.join()
            os.close(self.screen)
            os.close(self.keyboard)

    def _read(self) -> None:
        while not self._closed.is_set():
            if select.select([self.keyboard], [], [], 0.02)[0]:
                with suppress(OSError):
                    self.shown += os.read(self.keyboard, 1 << 16)


@contextmanager
def terminal() -> Iterator[Terminal]:
    """Have a terminal during the block."""
    made = Terminal()
    try:
        yield made
    finally:
        made.close()


def pipe(folder: Path, name: str = "pipe") -> str:
    """Make a named pipe and return its path."""
    path = folder / name
    os.mkfifo(path)
    return str(path)


@contextmanager
def unread_pipe(folder: Path) -> Iterator[str]:
    """Have a pipe with a reader who reads nothing and goes at the end of the block."""
    path = pipe(folder)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        yield path
    finally:
        os.close(reader)
