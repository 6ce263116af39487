"""What the system does to a command: signals that stop it, and standard streams that may be closed or full.

SIGINT is Ctrl-C; SIGTERM comes from `kill`, `docker stop` and schedulers, SIGHUP from a terminal that was closed. A
signal that was ignored when the process started, as SIGHUP under `nohup`, stays ignored.
"""

from __future__ import annotations

import gc
import io
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, cast

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# `timeout` signals its child and then its process group, a closing terminal signals a process both directly and through
# the shell: another SIGTERM or SIGHUP within this time belongs to the same request.
REPEAT_SECONDS = 1.0
WAKE_SECONDS = (0.1, 0.5, 2.0)  # after a stop signal, until a call in which the main thread may wait is interrupted
RAISE_AGAIN_SECONDS = 0.01  # until an interrupt that Python dropped is raised again
TORCHRUN = "TORCHELASTIC_RUN_ID"  # a variable of processes that torchrun has started
STOP_AT_INPUT_END = "TRIMTAB_STOP_AT_INPUT_END"  # the variable by which a parent process asks for `stop_at_input_end`
BROKEN_PIPE = 141  # the exit code that a shell reports for a process ended by SIGPIPE


GC_THRESHOLD = gc.get_threshold()


def collect_rarely() -> None:
    """Have the garbage collector look rarely while a command starts.

    Imports make many objects and hardly any garbage: a dry run takes 5.3 s of CPU time without this, 4.7 s with it.
    """
    gc.set_threshold(50_000, *GC_THRESHOLD[1:])


def collect_as_usual() -> None:
    """End `collect_rarely`: from here on, garbage may hold the memory of tensors."""
    gc.set_threshold(*GC_THRESHOLD)


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
        """Note a signal; return whether it is a new request and does not repeat the one before."""
        if not self:
            self.number = number
            self.received = time.monotonic()
        # torchrun passes Ctrl-C on to processes that the terminal has signalled already.
        elif (number != signal.SIGINT or TORCHRUN in os.environ) and time.monotonic() - self.received < REPEAT_SECONDS:
            return False
        else:
            self.again = True
        return True


_request = StopRequest()  # the last one made
_raised = 0  # the last signal for which `interrupt_on_stop_signals` raised
_ending = False  # whether this process ends already, and says why


def ignore_stop_signals() -> None:
    """Let no stop signal from now on interrupt this process, which is about to say why it ends."""
    global _ending  # noqa: PLW0603
    _ending = True


def interrupt_on_stop_signals() -> None:
    """Make SIGTERM and SIGHUP raise an interrupt as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        global _raised  # noqa: PLW0603
        if not _ending and _request.receive(number):
            _raised = number
            raise SignalInterrupt(number)

    if _set_handlers(interrupt):
        _watch_signals()
        _raise_dropped_interrupts()


def interrupted_by() -> int:
    """Return the last signal for which an interrupt was raised, 0 if there was none."""
    return _raised


def check_interrupted() -> None:
    """Raise an interrupt once more in case it was lost: some packages catch everything."""
    if _raised:
        raise SignalInterrupt(_raised)


@contextmanager
def deferred_stop(notify: Callable[[int], object], *, interrupt: bool = True) -> Iterator[StopRequest]:
    """Yield a request that the first stop signal fills in; another thread calls `notify` with the signal's number.

    The next request raises an interrupt or, without `interrupt`, only sets `again`.
    """
    global _request  # noqa: PLW0603
    check_interrupted()
    request = _request = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        if not _ending and request.receive(number) and request.again and interrupt:
            raise SignalInterrupt(number)

    before = _set_handlers(handle)
    end_watch = _watch_signals(notify) if before else lambda: None
    try:
        yield request
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
        end_watch()


def _watch_signals(notify: Callable[[int], object] = lambda number: None) -> Callable[[], None]:
    """Have a thread call `notify` with the first stop signal, and see that the main thread handles every one.

    Return a function that ends this.
    """
    # Python runs handlers in the main thread, between two of its instructions: none while it is in an exchange with
    # other processes, so it is the thread that notifies. A signal that arrives just before a `read` waits until the
    # `read` returns, for ever if no more input comes. So another signal, which does nothing, interrupts the call.
    read, write = os.pipe()
    os.set_blocking(write, False)
    ended = threading.Event()

    def watch() -> None:
        notified = False
        while numbers := os.read(read, 64):
            stops = [number for number in numbers if number in STOP_SIGNALS]
            if stops and not notified and not _ending:
                notified = True
                notify(stops[0])
            for seconds in WAKE_SECONDS if stops else ():
                if not ended.wait(seconds):
                    _signal_main_thread(signal.SIGURG)

    thread = threading.Thread(target=watch, name="trimtab-signals", daemon=True)
    thread.start()
    urgent = signal.signal(signal.SIGURG, lambda number, frame: None)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def end() -> None:
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)
        ended.set()
        os.close(write)
        thread.join()
        os.close(read)
        signal.signal(signal.SIGURG, urgent)

    return end


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
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # or code that asks a question would wait for the parent's answer

    def watch() -> None:
        while os.read(pipe, 1):
            pass
        if not _request:  # else a scheduler has signalled this process as well as its parent
            _signal_main_thread(signal.SIGTERM)

    threading.Thread(target=watch, name="trimtab-parent", daemon=True).start()


def _raise_dropped_interrupts() -> None:
    """Make an interrupt that Python drops come again, instead of printing that it was ignored."""
    # Python drops an exception that is raised in a destructor or in a callback, of which imports have many.
    before = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if not isinstance(unraisable.exc_value, SignalInterrupt):
            before(unraisable)
            return
        _request.received = -math.inf  # so that it does not count as a repetition
        # A little later and from another thread: raised here, it would be dropped again.
        timer = threading.Timer(RAISE_AGAIN_SECONDS, _signal_main_thread, [unraisable.exc_value.number])
        timer.daemon = True
        timer.start()

    sys.unraisablehook = hook


def _signal_main_thread(number: int) -> None:
    # To the thread and not to the process: a call in which the main thread waits then ends.
    signal.pthread_kill(threading.main_thread().ident or 0, number)


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


class OutputFile(io.FileIO):
    """Standard output or error. An error of writing is raised once, or never if the output is optional."""

    optional = False  # drop what cannot be written
    broken = False  # the reader at the other end of a pipe has gone

    def write(self, data: Any) -> int:
        """Write all bytes or drop the rest; return how many there were."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while rest:
                written = super().write(rest)
                if written is None:  # a full pipe that does not block
                    select.select([], [self], [])
                rest = rest[written or 0 :]
        except OSError as error:
            if not self.optional:
                self.broken = isinstance(error, BrokenPipeError)
                self.optional = True  # an error is raised once: what follows it belongs to the same output
                raise
        return size


def open_standard_streams() -> None:
    """Replace closed streams by the null device, and have text that an encoding lacks written as escapes."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # Else the next file that is opened would get this descriptor, and with it what a library prints.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    sys.stdout = _open_output(1, sys.stdout)
    sys.stderr = _open_output(2, sys.stderr)
    make_optional(sys.stderr)


def make_optional(stream: Any) -> None:
    """Drop from now on what cannot be written to a stream, for a command that has its results in files."""
    if isinstance(file := getattr(stream, "buffer", None), OutputFile):
        file.optional = True


def output_is_broken() -> bool:
    """Return whether writing to standard output has failed because its reader has gone."""
    file = getattr(sys.stdout, "buffer", None)
    return isinstance(file, OutputFile) and file.broken


def _open_output(descriptor: int, stream: Any) -> io.TextIOWrapper:
    file = OutputFile(descriptor, "w", closefd=False)
    encoding = stream.encoding if stream is not None else "utf-8"
    # Line by line also into pipes and files, where it is read while the command runs. No BufferedWriter in between: its
    # lock aborts Python at the end if a thread is still waiting for a slow reader.
    return io.TextIOWrapper(cast(Any, file), encoding, errors="backslashreplace", line_buffering=True)
