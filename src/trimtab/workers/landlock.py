"""Landlock: which files a process and its children may touch, enforced by the kernel without root.

The package `landlock` on PyPI (1.0.0.dev5) knows the rights of files only, not TCP (version 4) and scopes (version 6).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping

from trimtab.workers.linux import SYS_LANDLOCK_ADD, SYS_LANDLOCK_CREATE, SYS_LANDLOCK_RESTRICT, syscall

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
OF_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE  # the kernel refuses others for what is no folder

# Rights of files by version of the interface. A right that is not handled is not restricted, so all known are.
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_TCP = 3  # bind and connect, from version 4
_SCOPES = 3  # abstract sockets and signals stay within the ruleset's processes, from version 6


def landlock_version() -> int:
    """Return the version of the kernel's interface; raise OSError where there is none."""
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
