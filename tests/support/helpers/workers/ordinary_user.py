"""Become an ordinary user and start a program: `python ordinary_user.py UID PATHS PROGRAM...`, as root.

An interpreter below a home that only root may enter is shown to the user in a mount namespace of this process alone.
"""

import ctypes
import os
import sys
from pathlib import Path

NEWNS, BIND, REC, PRIVATE = 0x20000, 0x1000, 0x4000, 1 << 18
libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Mount, or raise."""
    if libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode()) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), target)


def closed_parent(path: str) -> str | None:
    """Return the topmost folder above a path that others may not enter."""
    return next((str(parent) for parent in reversed(Path(path).parents) if not parent.stat().st_mode & 1), None)


def show(paths: list[str]) -> None:
    """Make paths reachable for everyone, in this process's own mount namespace."""
    closed: dict[str, list[str]] = {}
    for path in paths:
        parent = closed_parent(path)
        if parent is not None:
            closed.setdefault(parent, []).append(path)
    if not closed:
        return
    if libc.unshare(NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "no mount namespace")
    mount("none", "/", "", PRIVATE | REC)
    for parent, below in closed.items():
        opened = {path: os.open(path, os.O_PATH) for path in below}
        mount("tmpfs", parent, "tmpfs", 0, "mode=755,size=1m")
        for path, descriptor in opened.items():
            os.makedirs(path, exist_ok=True)
            mount(f"/proc/self/fd/{descriptor}", path, "", BIND | REC)
            os.close(descriptor)


if __name__ == "__main__":
    user = int(sys.argv[1])
    show(sys.argv[2].split(os.pathsep))
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    os.execv(sys.argv[3], sys.argv[3:])
