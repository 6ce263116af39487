"""The walls around a run: namespaces, a file system of its own, landlock, seccomp, limits, no privileges.

The server enters a jail of its own once, with a read-only file system that holds the interpreter and nothing else. Each
run starts there, so its own namespaces take little to set up.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass

from trimtab.tools import landlock, linux
from trimtab.tools.seccomp import apply_filter
from trimtab.tools.visible_files import DEVICES, VisibleFiles
from trimtab.worker_process import limit_memory

NOBODY = 65534  # whom root becomes
INSIDE_ID = 1000  # user and group as seen inside
SCRATCH = "/tmp"
# Open at once. A pair of sockets holds 213 kB that no limit of memory counts: 32 processes with 31 pairs, 210 MB.
MAX_FILES = 64
INODES_PER_MB = 64

_OWN_NAMESPACES = (
    linux.NEWUSER | linux.NEWNS | linux.NEWNET | linux.NEWIPC | linux.NEWUTS | linux.NEWCGROUP
)  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """What a run may take: megabytes beyond what the server has, megabytes of files, processes and threads."""

    memory_mb: int = 512
    disk_mb: int = 64
    processes: int = 32


def drop_root() -> None:
    """Become nobody where this process is root."""
    # As root RLIMIT_NPROC is not enforced, and root owns files.
    if os.geteuid() != 0:
        return
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    linux.prctl(linux.PR_SET_DUMPABLE, 1)  # else /proc/self still belongs to root, and with it the ID maps


def enter_server_jail(files: VisibleFiles, proc: int) -> None:
    """Move this process into namespaces with a file system of the visible files; its next child has PID 1."""
    # Root builds the file system before it becomes nobody, who could not look into folders such as /root. Root without
    # CAP_SYS_ADMIN, as in a container, cannot, and is nobody in time.
    built = os.geteuid() == 0 and _may_mount()
    if built:
        _build_file_system(files)
    drop_root()
    user, group = os.geteuid(), os.getegid()
    linux.unshare(_OWN_NAMESPACES | linux.NEWPID)
    _map_ids(proc, user, group)
    if not built:
        _build_file_system(files)


def _may_mount() -> bool:
    """Enter a mount namespace, if this process may do that as it is."""
    try:
        linux.unshare(linux.NEWNS)
    except PermissionError:
        return False
    return True


def _build_file_system(files: VisibleFiles) -> None:
    """Replace the root of this mount namespace by a read-only one with the visible files."""
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    sources = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in (*files.paths, *DEVICES)}
    linux.mount("tmpfs", SCRATCH, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,mode=755")
    # Parents first: what lies in a hidden folder is mounted after the empty folder that hides it.
    for path in sorted({*sources, *files.hidden}):
        target = SCRATCH + path
        if path in files.hidden:
            linux.mount("tmpfs", target, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=64k,mode=755")
            continue
        # By descriptor: a path below /tmp is covered by now.
        source = f"/proc/self/fd/{sources[path]}"
        _make_mount_point(target, folder=os.path.isdir(source))
        linux.mount(source, target, None, linux.MS_BIND | linux.MS_REC)
        os.close(sources[path])
    for link, destination in files.links.items():
        if not os.path.lexists(SCRATCH + link):
            os.makedirs(os.path.dirname(SCRATCH + link), exist_ok=True)
            os.symlink(destination, SCRATCH + link)
    os.makedirs(SCRATCH + SCRATCH, exist_ok=True)
    os.symlink(SCRATCH, SCRATCH + "/dev/shm")  # locks of multiprocessing live there
    os.chdir(SCRATCH)
    linux.call("pivot_root", b".", b".")
    linux.call("umount2", b".", linux.MNT_DETACH)
    os.chdir("/")
    linux.make_read_only("/")


def enter_pid_namespace(own: int) -> None:
    """Give this process's next child a PID namespace of its own; `own` is a descriptor of this process's."""
    # A second `unshare` is refused unless children would be born in this process's own namespace.
    linux.call("setns", own, linux.NEWPID)
    linux.unshare(linux.NEWPID)


def enter_run_jail(limits: Limits, proc: int) -> None:
    """Enter the namespaces of a run, with an empty folder to write to."""
    linux.unshare(_OWN_NAMESPACES)
    _map_ids(proc, INSIDE_ID, INSIDE_ID)
    options = f"size={limits.disk_mb}m,nr_inodes={INODES_PER_MB * limits.disk_mb},mode=700"
    linux.mount("tmpfs", SCRATCH, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC, options)
    os.chdir(SCRATCH)


def lock_files(version: int, paths: list[str] | None = None) -> None:
    """Restrict files by landlock: within a jail to what is there, else to `paths`, and nothing to write to."""
    allowed = dict.fromkeys(DEVICES, landlock.DEVICE)
    if paths is None:
        allowed |= {"/": landlock.READ, SCRATCH: landlock.SCRATCH}
    else:
        allowed |= dict.fromkeys(paths, landlock.READ)
    landlock.restrict_files(version, allowed)


def limit_resources(limits: Limits, address_space: int) -> None:
    """Set the limits that hold for each process of a run, and for the number of them."""
    limit_memory(limits.memory_mb << 20, address_space)
    values = {
        resource.RLIMIT_NPROC: limits.processes,
        resource.RLIMIT_NOFILE: MAX_FILES,
        resource.RLIMIT_FSIZE: limits.disk_mb << 20,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 256,
    }
    for which, value in values.items():
        resource.setrlimit(which, (value, value))


def give_up_privileges(program: bytes) -> None:
    """Drop all capabilities, then apply the seccomp filter; nothing of the walls can be changed after it."""
    linux.drop_capabilities()
    if program:
        apply_filter(program)


def _map_ids(proc: int, user: int, group: int) -> None:
    """Map one user and one group into this process's new user namespace."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{INSIDE_ID} {user} 1"),
        ("gid_map", f"{INSIDE_ID} {group} 1"),
    ):
        file = os.open(f"self/{name}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
        try:
            os.write(file, text.encode())
        finally:
            os.close(file)


def _make_mount_point(target: str, folder: bool) -> None:
    if os.path.lexists(target):
        return
    os.makedirs(target if folder else os.path.dirname(target), exist_ok=True)
    if not folder:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC))
