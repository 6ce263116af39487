"""System calls that Python has no function for: namespaces, mounts, capabilities, landlock and seccomp, by ctypes."""

from __future__ import annotations

import ctypes
import os
import struct

_libc = ctypes.CDLL(None, use_errno=True)

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x0002_0000, 0x0200_0000, 0x0400_0000, 0x0800_0000
NEWUSER, NEWPID, NEWNET = 0x1000_0000, 0x2000_0000, 0x4000_0000

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
AT_RECURSIVE = 0x8000
OPEN_TREE_CLONE, OPEN_TREE_CLOEXEC, MOVE_MOUNT_FROM_EMPTY_PATH = 1, 0x8_0000, 4
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 1, 2

PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 4, 22, 38

# These have the same numbers on x86_64 and aarch64, and no wrapper in older C libraries.
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_CLOSE_RANGE = 428, 429, 436
SYS_MOUNT_SETATTR, SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 442, 444, 445, 446


def call(name: str, *arguments: object) -> int:
    """Call a function of the C library; raise OSError where it fails."""
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
    try:  # os.closerange closes a million one by one where Python was built without close_range: 100 ms
        syscall("close_range", SYS_CLOSE_RANGE, first, 0xFFFF_FFFF, 0)
    except OSError:
        os.closerange(first, 1 << 16)
