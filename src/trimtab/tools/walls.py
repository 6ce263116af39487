"""Which walls hold on this machine: each is tried in a process of its own before the server relies on it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from functools import cache

from trimtab.tools.jail import (
    Limits,
    drop_root,
    enter_run_jail,
    enter_server_jail,
    give_up_privileges,
    limit_resources,
    lock_files,
)
from trimtab.tools.landlock import landlock_version
from trimtab.tools.linux import PR_SET_NO_NEW_PRIVS, prctl
from trimtab.tools.seccomp import build_filter
from trimtab.tools.visible_files import VisibleFiles

_namespaced_filter = cache(lambda: build_filter(processes=True))


@dataclass(frozen=True)
class Walls:
    """How a run is walled in on this machine, found out once."""

    limits: Limits
    files: VisibleFiles
    proc: int  # a descriptor of /proc as it was outside
    namespaces: bool
    landlock: int  # its version, 0 where it is missing
    seccomp: bool

    def build_server(self) -> None:
        """Wall in the server itself, where there are namespaces."""
        if self.namespaces:
            enter_server_jail(self.files, self.proc)

    def build_run(self, address_space: int) -> None:
        """Wall in this process, which becomes a run."""
        if self.namespaces:
            enter_run_jail(self.limits, self.proc)
        if self.landlock:
            lock_files(self.landlock, None if self.namespaces else self.files.paths)
        limit_resources(self.limits, address_space)
        give_up_privileges(self.filter())

    def filter(self) -> bytes:
        """Return the seccomp filter's program; it is the same for all runs where PIDs are a run's own."""
        if not self.seccomp:
            return b""
        return _namespaced_filter() if self.namespaces else build_filter(processes=False, pid=os.getpid())


def find_walls(limits: Limits, files: VisibleFiles, proc: int, without: list[str]) -> tuple[Walls, dict[str, str]]:
    """Try each layer in a process of its own; return what holds, and for each layer why it does not."""
    version = 0
    reasons = dict.fromkeys(("namespaces", "landlock", "seccomp"), "")
    with contextlib.suppress(OSError):
        version = landlock_version()
    bare = Walls(limits, files, proc, namespaces=False, landlock=0, seccomp=False)
    for name, walls in {
        "namespaces": replace(bare, namespaces=True),
        "landlock": replace(bare, landlock=version or 1),
        "seccomp": replace(bare, seccomp=True),
    }.items():
        reasons[name] = "switched off" if name in without else _failure_of(walls)
    found = replace(
        bare,
        namespaces=not reasons["namespaces"],
        landlock=0 if reasons["landlock"] else version,
        seccomp=not reasons["seccomp"],
    )
    kept_root = not found.namespaces and os.geteuid() == 0 and not _may_drop_root(files)
    return found, reasons | {"uid": "nobody could not read the interpreter" if kept_root else ""}


def _failure_of(walls: Walls) -> str:
    """Return why walls cannot be built around a run, empty if they can."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            prctl(PR_SET_NO_NEW_PRIVS, 1)
            walls.build_server()
            if os.fork() == 0:
                walls.build_run(1 << 40)
            else:
                os.wait()
        except BaseException as error:
            os.write(write_end, f"{error}"[:500].encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as file:
        reason = file.read().decode("utf-8", "replace")
    os.waitpid(pid, 0)
    return reason


def _may_drop_root(files: VisibleFiles) -> bool:
    """Return whether nobody could still read the interpreter, which without namespaces keeps its place."""
    pid = os.fork()
    if pid == 0:
        drop_root()
        os._exit(0 if all(os.access(path, os.R_OK) for path in files.paths) else 1)
    return os.waitpid(pid, 0)[1] == 0
