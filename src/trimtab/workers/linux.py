"""System calls that Python has no function for (namespaces, mounts, capabilities, landlock), and limits of a process.

The package `landlock` on PyPI (1.0.0.dev5) knows the rights of files only, not TCP (version 4) and scopes (version 6).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
import sys
from collections.abc import Mapping

_libc = ctypes.CDLL(None, use_errno=True)

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x0002_0000, 0x0200_0000, 0x0400_0000, 0x0800_0000
NEWUSER, NEWPID, NEWNET = 0x1000_0000, 0x2000_0000, 0x4000_0000

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
AT_RECURSIVE = 0x8000
OPEN_TREE_CLONE, OPEN_TREE_CLOEXEC, MOVE_MOUNT_FROM_EMPTY_PATH = 1, 0x8_0000, 4
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 1, 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
PR_SET_CHILD_SUBREAPER = 36
MOST_ROUNDS = 100  # of killing what is started meanwhile

# These have the same numbers on x86_64 and aarch64, and no wrapper in older C libraries.
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_CLOSE_RANGE = 428, 429, 436
SYS_MOUNT_SETATTR, SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 442, 444, 445, 446

# Landlock: which files a process and its children may touch, enforced by the kernel without root.
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
REMOVE_DIR, REMOVE_FILE, MAKE_DIR, MAKE_REG, MAKE_FIFO, MAKE_SYM = 16, 32, 128, 256, 1024, 4096
REFER, TRUNCATE = 1 << 13, 1 << 14

READ = EXECUTE | READ_FILE | READ_DIR
# No sockets, no device files, nothing to execute.
SCRATCH = (
    WRITE_FILE | READ_FILE | READ_DIR | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | MAKE_FIFO | MAKE_SYM
    | REFER | TRUNCATE
)  # fmt: skip
DEVICE = READ_FILE | WRITE_FILE | TRUNCATE
OF_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE  # the kernel refuses others for what is not a folder

# Rights of files by version of the interface. A right that is not handled is not restricted, so all known are.
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_TCP = 3  # bind and connect, from version 4
_SCOPES = 3  # abstract sockets and signals stay within the ruleset's processes, from version 6


def call(name: str, *arguments: object) -> int:
    """Call a function of the C library; raise OSError if it fails."""
    result: int = getattr(_libc, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def syscall(name: str, number: int, *arguments: object) -> int:
    """Make a system call; `name` is for the error."""
    # As longs: ctypes would pass an int in 32 bits and leave the upper half of the register as it is.
    words = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result: int = _libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def unshare(flags: int) -> None:
    """Enter new namespaces."""
    call("unshare", flags)


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process."""
    call("prctl", option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Mount a file system, or bind a path to another."""
    text = options.encode() if options else None
    call("mount", source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), text)


def copy_mounts(source: str) -> int:
    """Return a descriptor of a copy of a path and all that is mounted below it."""
    flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE
    return syscall("open_tree", SYS_OPEN_TREE, -100, source.encode(), flags)


def attach_mounts(copy: int, target: str) -> None:
    """Mount such a copy on a path."""
    syscall("move_mount", SYS_MOVE_MOUNT, copy, b"", -100, target.encode(), MOVE_MOUNT_FROM_EMPTY_PATH)


def make_read_only(target: str) -> None:
    """Make a mount and all below it read-only, and set-uid files without effect."""
    # Not MS_REMOUNT, which must repeat the flags that each mount has already and cannot go down the tree.
    attributes = struct.pack("QQQQ", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    syscall("mount_setattr", SYS_MOUNT_SETATTR, -100, target.encode(), AT_RECURSIVE, attributes, len(attributes))


def drop_capabilities() -> None:
    """Give up all capabilities. With no_new_privs, nothing that is executed later gets one back."""
    version_3 = struct.pack("Ii", 0x2008_0522, 0)
    call("capset", version_3, bytes(24))


def landlock_version() -> int:
    """Return the version of the kernel's interface; raise OSError if there is none."""
    return syscall("landlock_create_ruleset", SYS_LANDLOCK_CREATE, None, 0, 1)


def restrict_files(version: int, allowed: Mapping[str, int]) -> None:
    """Allow this process the given rights below the given paths, and nothing else."""
    handled = max((rights for first, rights in _RIGHTS.items() if first <= version))
    # The structure grew with the versions, and an old kernel refuses a longer one.
    attributes = struct.pack("QQQ", handled, _TCP, _SCOPES)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    ruleset = syscall("landlock_create_ruleset", SYS_LANDLOCK_CREATE, attributes, len(attributes), 0)
    for path, rights in allowed.items():
        file = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if not os.path.isdir(path):
            rights &= OF_A_FILE  # noqa: PLW2901
        syscall("landlock_add_rule", SYS_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", rights & handled, file), 0)
        os.close(file)
    syscall("landlock_restrict_self", SYS_LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)


def use_huge_pages(maps: str) -> None:
    """Gather this process's memory in huge pages; `maps` is the text of /proc/self/maps."""
    # A fork copies the tables of all pages and an exit takes them down: with huge pages both take half the time.
    size, collapse = 1 << 21, 25
    for line in maps.splitlines():
        area, rights, *rest = line.split(maxsplit=5)
        if rights == "rw-p" and (len(rest) < 4 or rest[3] == "[heap]"):
            start, end = (int(address, 16) for address in area.split("-"))
            start, end = -(-start // size) * size, end // size * size
            if end > start:  # MADV_COLLAPSE is new in Linux 6.1; without it all works the same
                _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), collapse)


def close_from(first: int) -> None:
    """Close all descriptors from one on."""
    # os.closerange closes a million one by one if Python was built without close_range: 100 ms.
    try:
        if sys.platform == "linux":
            syscall("close_range", SYS_CLOSE_RANGE, first, 0xFFFF_FFFF, 0)
            return
    except OSError:
        pass
    os.closerange(first, 1 << 16)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, and end it if that has happened already."""
    # Not for a server: PR_SET_PDEATHSIG goes by the thread that started a process, and the server may be started by a
    # thread that ends. It notices the end of its socket instead.
    with contextlib.suppress(OSError, AttributeError):  # another system
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() not in (parent, 0):  # 0: the parent is outside this process's PID namespace
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of what this process's children leave behind, so that all it has started is found."""
    with contextlib.suppress(OSError, AttributeError):  # another system
        prctl(PR_SET_CHILD_SUBREAPER, 1)


def children(pid: int) -> list[int]:
    """Return the processes that a process and its threads have started; none if the kernel does not tell."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
    return found


def kill_descendants(pid: int) -> None:
    """Kill all that a process has started, whatever groups and sessions they are in; another process is stopped first.

    What its children have left behind is found if it adopts orphans.
    """
    if not children(pid):
        return
    if pid != os.getpid():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGSTOP)
    killed: set[int] = set()
    for _ in range(MOST_ROUNDS):
        left = children(pid)
        for each in left:  # grows: what a child has started is behind it
            left += children(each)
        if killed.issuperset(left):
            return
        for each in {*left} - killed:
            with contextlib.suppress(OSError):
                os.kill(each, signal.SIGKILL)
        killed.update(left)


def limit_memory(beyond: int, used: int | None = None) -> None:
    """Limit this process's address space to so many bytes beyond what it has, and write no core dumps."""
    limit = beyond + (address_space() if used is None else used)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def address_space(proc: int | None = None) -> int:
    """Return the bytes of this process's address space; `proc` is a descriptor of /proc if that is not mounted."""
    try:
        name = "/proc/self/statm" if proc is None else "self/statm"
        with open(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc), "rb") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 1 << 30  # no /proc: the limit is looser by this
