"""Functions and commands in processes of their own, which tests can signal and kill."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from helpers.train.short_runs import PRELOAD

HANG = 120.0  # seconds after which something is taken for hung


WARM_STARTS = "TRIMTAB_WARM_START"  # where a test's runs keep them


def in_own_process(target: Callable[..., object], *arguments: Any) -> BaseProcess:
    """Start a function in a process of its own; it is killed when this one ends."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    place = os.environ.get(WARM_STARTS, "")
    process = context.Process(target=_with_warm_starts, args=(place, target, *arguments), daemon=True)
    process.start()
    return process


def _with_warm_starts(place: str, target: Callable[..., object], *arguments: Any) -> None:
    # The fork server has the environment of the test that started it.
    os.environ[WARM_STARTS] = place
    target(*arguments)


class Terminal:
    """A terminal that a process opens at `path`; what is shown on it is read and dropped."""

    def __init__(self) -> None:
        self.keyboard, self.screen = os.openpty()
        self.path = os.ttyname(self.screen)
        self._closed = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def close(self) -> None:
        """Hang up: the kernel sends SIGHUP, and writing to the terminal is an error from now on."""
        self._closed.set()
        self._reader.join()
        os.close(self.screen)
        os.close(self.keyboard)

    def _read(self) -> None:
        while not self._closed.is_set():
            if select.select([self.keyboard], [], [], 0.05)[0]:
                os.read(self.keyboard, 1 << 16)


def start_command(arguments: list[str], output: str | None, folder: Path) -> BaseProcess:
    """Start `trimtab` in a folder with its output going to a path, which may be a terminal's; None: closed."""
    return in_own_process(run_command, arguments, output, folder)


def run_command(arguments: list[str], output: str | None, folder: Path) -> None:
    """Be a process that was started as `trimtab`."""
    os.setsid()  # a terminal that is opened now becomes this process's own, and hangs up when it is closed
    os.chdir(folder)
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        signal.signal(number, handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if output is None:
        os.close(1)
        os.close(2)
        sys.stdout = sys.stderr = None  # as Python starts then
    else:
        # Only a terminal that can be read too becomes the process's own; a pipe would have a reader then.
        access = os.O_RDWR if output.startswith("/dev/") else os.O_WRONLY
        descriptor = os.open(output, access | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
    from trimtab.cli import app

    app(arguments)


def exit_code(process: BaseProcess) -> int:
    """Wait until a process has ended and return its exit code."""
    process.join(HANG)
    assert process.exitcode is not None, "it hangs"
    return process.exitcode


def wait_until(condition: Callable[[], object], process: BaseProcess | None = None) -> None:
    """Wait until a condition holds, while the process is running."""
    limit = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < limit, "it never comes true"
        assert process is None or process.is_alive() or condition(), f"it ended with {process.exitcode}"
        time.sleep(0.02)
