"""What worker processes of all kinds need: a path to trimtab, an end with their parent, a limit on memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def package_path() -> list[str]:
    """Return the path on which a worker finds trimtab, installed or not, and what this process was given to find."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    # An empty entry, as `PYTHONPATH=$PYTHONPATH:/more` leaves one, would mean the current folder.
    return [here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]


def die_with_parent(parent: int) -> None:
    """Have Linux kill this worker when its parent dies, and end it if that has happened already."""
    # Not for a server: PR_SET_PDEATHSIG goes by the thread that started a process, and the server may be started by a
    # thread that ends. It notices the end of its input instead.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def limit_memory(beyond: int, used: int | None = None) -> None:
    """Limit this process's address space to so many bytes beyond what it has, and write no core dumps."""
    import resource

    limit = beyond + (address_space() if used is None else used)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def address_space(proc: int | None = None) -> int:
    """Return the bytes of this process's address space; `proc` is a descriptor of /proc for where it is not mounted."""
    try:
        name = "/proc/self/statm" if proc is None else "self/statm"
        with open(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc), "rb") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 1 << 30  # no /proc: the limit is looser by this


def write_all(pipe: int, data: bytes) -> None:
    """Write to a pipe until all is written."""
    while data:
        data = data[os.write(pipe, data) :]
