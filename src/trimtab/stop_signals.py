"""SIGINT (Ctrl-C), SIGTERM and SIGHUP as requests to stop, at once or after the work under way.

SIGTERM comes from `kill`, `docker stop` and schedulers, SIGHUP from a terminal that was closed. A signal that was
ignored when the process started, as SIGHUP under `nohup`, stays ignored.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# `timeout` signals its child and then its process group, a closing terminal signals a process both directly and through
# the shell: another SIGTERM or SIGHUP within this time belongs to the same request.
REPEAT_SECONDS = 1.0
RAISE_AGAIN_SECONDS = 0.01  # until an interrupt that was dropped is raised again
WAKE_SECONDS = 0.1  # between two attempts to end a call in which the main thread waits
WAKES, WAKES_UNTOLD = 50, 10  # attempts, and after how many of them another thread announces the stop
TORCHRUN = "TORCHELASTIC_RUN_ID"  # a variable of processes that torchrun has started
STOP_AT_INPUT_END = "TRIMTAB_STOP_AT_INPUT_END"  # the variable by which a parent process asks for `stop_at_input_end`


class SignalInterrupt(KeyboardInterrupt):
    """A signal asked the process to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass
class StopRequest:
    """The first stop signal received, 0 while there is none, and whether another request followed."""

    number: int = 0
    again: bool = False
    received: float = 0.0

    def __bool__(self) -> bool:
        return self.number != 0

    @property
    def urgent(self) -> bool:
        """Whether the sender may soon kill the process, as no person at a keyboard does."""
        return self.number in (signal.SIGTERM, signal.SIGHUP)

    def receive(self, number: int) -> bool:
        """Note a signal; return whether it is a request of its own, not a repetition of the one before."""
        if not self:
            self.number, self.received = number, time.monotonic()
        # torchrun passes Ctrl-C on to processes that the terminal has signalled already.
        elif (number != signal.SIGINT or TORCHRUN in os.environ) and time.monotonic() - self.received < REPEAT_SECONDS:
            return False
        else:
            self.again = True
        return True


_request = StopRequest()  # the last one made
_raised = 0  # the last signal for which `interrupt_on_stop_signals` raised
_dropped = 0  # the signal of an interrupt that Python dropped and that is yet to be raised again
_ending = False  # whether this process ends already, and says why
_announce: Callable[[int], object] | None = None  # tells that a stop signal has come, in `deferred_stop`
_handled = False  # whether a handler of stop signals has run; no Event, whose lock a second signal would wait for


def ignore_stop_signals() -> None:
    """Let no stop signal from now on interrupt this process, which is about to say why it ends."""
    global _ending  # noqa: PLW0603
    _ending = True


def interrupt_on_stop_signals() -> None:
    """Make SIGTERM and SIGHUP raise an interrupt as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        global _raised  # noqa: PLW0603
        _note_handled()
        if _ending:
            return
        if _take_dropped() or _request.receive(number):
            _raised = number
            raise SignalInterrupt(number)

    if _set_handlers(interrupt):
        _raise_dropped_interrupts()
        _wake_main_thread_on_signals()


def interrupted_by() -> int:
    """Return the last signal for which an interrupt was raised, 0 if there was none."""
    return _raised


def check_interrupted() -> None:
    """Raise an interrupt once more in case it was lost."""
    # Some packages catch everything.
    if _raised:
        _take_dropped()
        raise SignalInterrupt(_raised)


@contextmanager
def deferred_stop(notify: Callable[[int], object], *, interrupt: bool = True) -> Iterator[StopRequest]:
    """Yield a request that the first stop signal fills in, and call `notify` with the signal's number.

    The next request raises an interrupt or, without `interrupt`, only sets `again`. `notify` is called by another
    thread if the main thread waits in a call that no signal ends, such as an exchange with other processes.
    """
    global _request, _announce  # noqa: PLW0603
    check_interrupted()
    request = _request = StopRequest()
    announced = False

    def announce(number: int) -> None:
        nonlocal announced
        if not announced:
            announced = True
            with suppress(RuntimeError):  # a signal in the middle of a print makes another print a reentrant call
                notify(number)

    def handle(number: int, frame: FrameType | None) -> None:
        _note_handled()
        if _ending:
            return
        if _take_dropped():
            raise SignalInterrupt(number)
        if not request.receive(number):
            return
        if not request.again:
            announce(number)
        elif interrupt:
            raise SignalInterrupt(number)

    before, announce_before = _set_handlers(handle), _announce
    if before:
        _announce = announce
    try:
        yield request
    finally:
        _announce = announce_before
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def unheeded_in_children() -> Iterator[None]:
    """Keep stop signals from the processes that this thread starts in the block.

    Ctrl-C in a terminal, and the SIGTERM of a scheduler, reach every process of a job. A process whose work its parent
    needs in order to stop well ends when the parent tells it to.
    """
    # Blocked, which a child inherits, and not ignored: handlers can be set in the main thread only.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def exit_code(error: KeyboardInterrupt) -> int:
    """Return the exit code that a shell reports for a process that the signal has ended."""
    return 128 + (error.number if isinstance(error, SignalInterrupt) else signal.SIGINT)


def stop_at_input_end() -> None:
    """If the environment asks for it, stop this process as SIGTERM does as soon as its standard input ends.

    The parent process that asks for it holds the other end of a pipe. It closes the pipe to stop this process; if it is
    killed, the kernel closes it.
    """
    # A pipe, because PR_SET_PDEATHSIG exists on Linux only and fires when the thread that started the process ends.
    if not os.environ.pop(STOP_AT_INPUT_END, ""):
        return
    pipe = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # or whatever asks a question would wait for the parent's answer

    def watch() -> None:
        while os.read(pipe, 1):
            pass
        if not _request:  # else a scheduler has signalled this process as well as its parent
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    threading.Thread(target=watch, name="trimtab-parent", daemon=True).start()


def _wake_main_thread_on_signals() -> None:
    """Have a stop signal end a call in which the main thread waits, whenever it arrives."""
    # Python runs handlers in the main thread, between two of its instructions. A signal that arrives just before a
    # `read`, or is delivered to another thread, waits until the `read` returns: for ever, if no more input comes. So
    # a thread interrupts the main thread by another signal, which does nothing, until the handler has run.
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGURG, lambda number, frame: None)

    def watch() -> None:
        global _handled  # noqa: PLW0603
        while numbers := os.read(read, 64):
            if stops := [number for number in numbers if number in STOP_SIGNALS]:
                for attempt in range(WAKES):
                    time.sleep(WAKE_SECONDS)
                    if _handled:
                        break
                    if attempt == WAKES_UNTOLD and _announce is not None:
                        _announce(stops[0])
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)
                _handled = False

    threading.Thread(target=watch, name="trimtab-signals", daemon=True).start()


def _raise_dropped_interrupts() -> None:
    """Make an interrupt that Python drops come again, instead of printing that it was ignored."""
    # Python drops an exception that is raised in a destructor or in a callback, of which imports have many.
    before = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        global _dropped  # noqa: PLW0603
        if not isinstance(unraisable.exc_value, SignalInterrupt):
            before(unraisable)
            return
        _dropped = unraisable.exc_value.number
        # A little later and from another thread: raised here, it would be dropped again.
        timer = threading.Timer(RAISE_AGAIN_SECONDS, send)
        timer.daemon = True
        timer.start()

    def send() -> None:
        if _dropped:
            signal.pthread_kill(threading.main_thread().ident or 0, _dropped)

    sys.unraisablehook = hook


def _note_handled() -> None:
    """Tell the thread that wakes the main thread that a handler runs."""
    global _handled  # noqa: PLW0603
    _handled = True


def _take_dropped() -> bool:
    """Return whether an interrupt was dropped that has not been raised again, which the caller now does."""
    global _dropped
    dropped, _dropped = _dropped, 0
    return dropped != 0


def _set_handlers(handler: Callable[[int, FrameType | None], object]) -> dict[signal.Signals, Any]:
    """Set the handler of all stop signals that are not ignored; return the handlers before."""
    # Python accepts signal handlers in the main thread only; elsewhere no signal arrives.
    if threading.current_thread() is not threading.main_thread():
        return {}
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    heeded = {number: previous for number, previous in before.items() if previous is not signal.SIG_IGN}
    for number in heeded:
        signal.signal(number, handler)
    return heeded
