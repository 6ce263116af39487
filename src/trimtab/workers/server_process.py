"""A fork server as the process that starts it sees it: a child process and a socket to it.

The server ends when the socket closes, so it never outlives the process that started it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from typing import Any

from trimtab.process import unheeded_in_children

END_SECONDS = 2.0  # for a server to end by itself once its socket is closed


class ServerProcess:
    """A fork server; usable from many threads of the process that started it, and from no forked child."""

    def __init__(self, module: str, arguments: Sequence[str], kind: socket.SocketKind, **options: Any) -> None:
        self.owner = os.getpid()
        self.held: set[socket.socket | int] = set()  # to be closed in a forked child: they keep the server alive
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, kind)
        # -P: without it `python -m` looks for every module in the current folder first, and a `sympy.py` that came
        # with downloaded data would run.
        # `subprocess` and not `multiprocessing`: daemonic processes may use it, and it copies none of this process's
        # memory, threads and CUDA state.
        command = [sys.executable, "-P", "-m", module, str(theirs.fileno()), *arguments]
        with theirs, unheeded_in_children():  # the step under way still needs the server
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True, **options
            )
        self.held.add(self.requests)
        self.close = weakref.finalize(self, _end, self.process, self.requests, self.owner)
        _servers.add(self)

    @property
    def usable(self) -> bool:
        """Whether the server runs and was started by this process."""
        return self.owner == os.getpid() and self.process.poll() is None

    def let_go(self) -> None:
        """Close what a forked child has of its parent's server."""
        for each in self.held:
            with contextlib.suppress(OSError):
                os.close(each) if isinstance(each, int) else each.close()
        self.process.returncode = 0  # so that Popen does not wait for a process that is not ours


def package_path() -> str:
    """Return the PYTHONPATH of a server: where trimtab is, installed or not, and what this process was given."""
    here = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    # An empty entry, as `PYTHONPATH=$PYTHONPATH:/more` leaves one, would mean the current folder.
    return os.pathsep.join([here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])


def _end(process: subprocess.Popen[bytes], requests: socket.socket, owner: int) -> None:
    """End a server, and with it all that it has forked."""
    if owner != os.getpid():
        return
    with contextlib.suppress(OSError):
        requests.shutdown(socket.SHUT_RDWR)
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    requests.close()


_servers: weakref.WeakSet[ServerProcess] = weakref.WeakSet()


def _let_go_of_all() -> None:
    for server in list(_servers):
        server.let_go()
    _servers.clear()


os.register_at_fork(after_in_child=_let_go_of_all)
