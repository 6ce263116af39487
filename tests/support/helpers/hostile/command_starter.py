"""Start commands of trimtab, each under a guard that ends when the command and everything it started have ended.

Run as `python -P command_starter.py`; every line on standard input is an `Order` in JSON. The modules that commands
need are imported once, and each command is a fork of this process, or a new interpreter if its order says `fresh`. A
guard is a child subreaper: whatever a command leaves behind becomes the guard's child, even a daemon. In the order's
folder it writes `guard` and `pid`, `code` when the command has ended, and `gone` when no process is left.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

PRELOAD = [
    "torch._dynamo",
    "transformers.masking_utils",
    "transformers.tokenization_utils_tokenizers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "trimtab.cli",
    "trimtab.experiments.grid",
    "trimtab.cli.launch",
    "trimtab.experiments.evaluate",
    "trimtab.insight",
    "trimtab.trainer.train",
]
PR_SET_CHILD_SUBREAPER = 36
CLOSED = "closed"  # instead of a path: the descriptor is not open


@dataclass
class Order:
    """A command, and the process it shall be.

    At the failpoint `at`, as "step.done:2" for its second passage, the process sends itself the `signals`; after the
    word "group" they go to its process group; after "destructor" the next comes in a destructor, where Python drops
    what a handler raises; a number is a pause in seconds. If `begin` is named, the command
    begins when that file exists.
    """

    words: list[str]
    folder: str
    cwd: str
    fresh: bool = False
    stdin: str = "/dev/null"
    stdout: str = "/dev/null"
    stderr: str = "/dev/null"
    ignored: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    begin: str = ""
    at: str = ""
    signals: list[str | float] = field(default_factory=list)


def serve() -> Order:
    """Return in each command's process, with its order."""
    for name in PRELOAD:
        __import__(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # guards need not be waited for
    for line in sys.stdin:
        order = Order(**json.loads(line))
        if os.fork() == 0:
            guard(order)
            return order
    sys.exit()


def guard(order: Order) -> None:
    """Fork the command, in which this returns, and stay until no descendant is left."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # one that comes before the command has begun ends it quietly
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    pid = os.fork()
    if pid == 0:
        become(order)
        return
    note(order, "guard", str(os.getpid()))
    note(order, "pid", str(pid))
    while True:
        try:
            ended, status = os.wait()
        except ChildProcessError:
            break
        if ended == pid:
            note(order, "code", str(os.waitstatus_to_exitcode(status)))
    note(order, "gone", "")
    os._exit(0)


def note(order: Order, name: str, text: str) -> None:
    """Write a file that is whole as soon as it can be seen."""
    path = Path(order.folder) / name
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def become(order: Order) -> None:
    """Be a process as a shell starts it: a session, a working directory, standard streams and signals of its own."""
    os.setsid()  # a terminal that is opened now becomes this process's own, and hangs up when it is closed
    os.chdir(order.cwd)
    os.environ.update(order.environment)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
        ignored = signal.Signals(number).name in order.ignored
        signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
    opened = [open_stream(path, number) for number, path in enumerate((order.stdin, order.stdout, order.stderr))]
    note(order, "opened", "")
    while order.begin and not os.path.exists(order.begin):
        time.sleep(0.01)
    if order.fresh:
        for number, is_open in enumerate(opened):
            if not is_open:
                os.close(number)
        os.execv(sys.executable, [sys.executable, "-P", "-m", "trimtab", *order.words])
    as_started(order, opened)
    if order.at:
        signal_at_failpoint(order)


def open_stream(path: str, number: int) -> bool:
    """Open a standard stream; return whether it is to be open."""
    # Only a terminal that can be read too becomes the process's own; a pipe would have a reader then.
    terminal = path.startswith("/dev/pts")
    access = os.O_RDWR if terminal else os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_APPEND | os.O_CREAT
    descriptor = os.open("/dev/null" if path == CLOSED else path, access)
    os.dup2(descriptor, number)
    if descriptor != number:
        os.close(descriptor)
    return path != CLOSED


def as_started(order: Order, opened: list[bool]) -> None:
    """Set what a new interpreter sets: handlers, arguments and text streams."""
    if "SIGINT" not in order.ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    sys.argv = ["trimtab", *order.words]
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if not opened[number]:
            os.close(number)
        buffering = 1 if number == 2 or (opened[number] and os.isatty(number)) else -1
        errors = "backslashreplace" if number == 2 else "strict"
        stream = None
        if opened[number]:
            stream = open(number, mode, buffering, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def kill_in_destructor(pid: int, number: int) -> None:
    """Send a signal while a destructor runs."""

    class Destroyed:
        def __del__(self) -> None:
            os.kill(pid, number)

    Destroyed()


def signal_at_failpoint(order: Order) -> None:
    """Send the signals when the process passes its failpoint for the so-manieth time."""
    from trimtab import failpoints

    wanted, _, count = order.at.partition(":")
    passed: Counter[str] = Counter()

    def due(name: str) -> bool:
        passed[name] += 1
        return name == wanted and passed[name] == int(count)

    def send() -> None:
        note(order, "reached", "")
        target = os.kill
        for each in order.signals:
            if isinstance(each, float):
                time.sleep(each)
            elif each == "group":
                target = os.killpg
            elif each == "destructor":
                target = kill_in_destructor
            else:
                target(os.getpid(), signal.Signals[each])

    failpoints.due, failpoints.die = due, send


if __name__ == "__main__":
    serve()

    from trimtab.cli import app

    sys.exit(app(prog_name="trimtab"))
