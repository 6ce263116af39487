"""The walls around a run: namespaces, its own file system, landlock, seccomp, limits, no privileges.

Each wall is tried in a separate process before the server relies on it.

The server enters its own jail once, with a read-only file system that holds the interpreter and nothing else. Each
run starts there, so its own namespaces take little to set up.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

from trimtab.workers import linux
from trimtab.workers.seccomp import apply_filter, build_filter
from trimtab.workers.visible_files import DEVICES, VisibleFiles

NOBODY = 65534  # whom root becomes
INSIDE_ID = 1000  # user and group as seen inside
SCRATCH = "/tmp"
STAYS_ROOT = "root cannot become nobody"
NICE = 10  # as the workers that grade: programs must not starve them, nor the trainer that waits
# Open at once. A pair of sockets holds 213 kB that no limit of memory counts: 32 processes with 31 pairs, 210 MB.
MAX_FILES = 64
INODES_PER_MB = 64

_OWN_NAMESPACES = linux.NEWUSER | linux.NEWNS | linux.NEWIPC | linux.NEWUTS | linux.NEWCGROUP


@dataclass(frozen=True)
class Limits:
    """What a run may take: megabytes beyond what the server has, megabytes of files, processes and threads."""

    memory_mb: int = 512
    disk_mb: int = 64
    processes: int = 32


def drop_root() -> None:
    """Become nobody if this process is root; raise PermissionError if root may not."""
    # As root RLIMIT_NPROC is not enforced, and root owns files.
    if os.geteuid() != 0:
        return
    try:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    except OSError as error:
        raise PermissionError(f"{STAYS_ROOT} ({error.strerror})") from None
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
    linux.unshare(_OWN_NAMESPACES | linux.NEWNET | linux.NEWPID)
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
    """Give this process's next child its own PID namespace; `own` is a descriptor of this process's."""
    # A second `unshare` is refused unless children would be born in this process's own namespace.
    linux.call("setns", own, linux.NEWPID)
    linux.unshare(linux.NEWPID)


def enter_network_namespace(kept: list[int], proc: int) -> None:
    """Move this process, and with it its next child, to the last of the network namespaces kept, or to a new one."""
    # No socket outlives its processes: after a run its namespace is as empty as a new one. To make and remove one takes
    # a millisecond, and its removal holds up the next.
    if kept:
        linux.call("setns", kept[-1], linux.NEWNET)
    else:
        linux.unshare(linux.NEWNET)
        kept.append(os.open("self/ns/net", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc))


def enter_run_jail(limits: Limits, proc: int) -> None:
    """Enter the namespaces of a run, with an empty folder to write to."""
    linux.unshare(_OWN_NAMESPACES)
    _map_ids(proc, INSIDE_ID, INSIDE_ID)
    # An interpreter that lies below /tmp itself stays there, beside the program's files.
    copies = {f"{SCRATCH}/{name}": linux.copy_mounts(f"{SCRATCH}/{name}") for name in os.listdir(SCRATCH)}
    options = f"size={limits.disk_mb}m,nr_inodes={INODES_PER_MB * limits.disk_mb},mode=700"
    linux.mount("tmpfs", SCRATCH, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC, options)
    for path, copy in copies.items():
        _make_mount_point(path, folder=os.path.isdir(copy))
        linux.attach_mounts(copy, path)
    os.chdir(SCRATCH)


def lock_files(version: int, paths: list[str] | None = None) -> None:
    """Restrict files by landlock: within a jail to what is there, else to `paths`, and nothing to write to."""
    allowed = dict.fromkeys(DEVICES, linux.DEVICE)
    if paths is None:
        allowed |= {"/": linux.READ, SCRATCH: linux.SCRATCH}
    else:
        allowed |= dict.fromkeys(paths, linux.READ)
    linux.restrict_files(version, allowed)


def limit_resources(limits: Limits, address_space: int) -> None:
    """Set the limits that hold for each process of a run, and for the number of them."""
    linux.limit_memory(limits.memory_mb << 20, address_space)
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
    os.nice(NICE)


def confine() -> None:
    """Take sockets, writing to files and new privileges from this process and from all it will start.

    For code of our own that reads what a model or a stranger wrote. It is applied once, and forks inherit it at no
    price; a layer that the machine lacks is left out.
    """
    missing = (OSError, AttributeError, KeyError)  # on another kernel, another system, another processor
    with contextlib.suppress(*missing):
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    with contextlib.suppress(*missing):
        linux.restrict_files(linux.landlock_version(), {"/": linux.READ, "/dev/null": linux.DEVICE})
    with contextlib.suppress(*missing):
        apply_filter(build_filter(processes=True, priorities=True))


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


_namespaced_filter = cache(lambda: build_filter(processes=True))


@dataclass(frozen=True)
class Walls:
    """How a run is walled in on this machine, found out once."""

    limits: Limits
    files: VisibleFiles
    proc: int  # a descriptor of /proc as it was outside
    namespaces: bool
    landlock: int  # its version, 0 if it is missing
    seccomp: bool

    def build_server(self) -> None:
        """Wall in the server itself, if there are namespaces."""
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
        """Return the seccomp filter's program; it is the same for all runs if they have PID namespaces."""
        if not self.seccomp:
            return b""
        return _namespaced_filter() if self.namespaces else build_filter(processes=False, pid=os.getpid())


def find_walls(limits: Limits, files: VisibleFiles, proc: int, without: list[str]) -> tuple[Walls, dict[str, str]]:
    """Try each layer in a separate process; return what holds, and for each layer why it does not."""
    version = 0
    reasons = dict.fromkeys(("namespaces", "landlock", "seccomp"), "")
    with contextlib.suppress(OSError):
        version = linux.landlock_version()
    bare = Walls(limits, files, proc, namespaces=False, landlock=0, seccomp=False)
    for name, walls in {
        "namespaces": replace(bare, namespaces=True),
        "landlock": replace(bare, landlock=version or 1),
        "seccomp": replace(bare, seccomp=True),
    }.items():
        reasons[name] = "switched off" if name in without else _failure_of(partial(_try, walls))
    found = replace(
        bare,
        namespaces=not reasons["namespaces"],
        landlock=0 if reasons["landlock"] else version,
        seccomp=not reasons["seccomp"],
    )
    drops_root = not found.namespaces and os.geteuid() == 0
    return found, reasons | {"uid": _failure_of(partial(_read_as_nobody, files)) if drops_root else ""}


def _failure_of(attempt: Callable[[], None]) -> str:
    """Attempt something in a separate process; return why it fails, empty if it does not."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            attempt()
        except BaseException as error:
            os.write(write_end, (str(error) or type(error).__name__)[:500].encode("utf-8", "replace"))
        finally:
            os._exit(0)  # in any case: this process must not go on as its parent does
    os.close(write_end)
    with open(read_end, "rb") as file:
        reason = file.read().decode("utf-8", "replace")
    status = os.waitpid(pid, 0)[1]
    return reason or (f"trying it ended with {status}" if status else "")


def _try(walls: Walls) -> None:
    """Build walls around a server and a run."""
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    walls.build_server()
    if os.fork() == 0:
        walls.build_run(1 << 40)
    elif status := os.wait()[1]:  # killed, for example by a seccomp filter of a container
        raise OSError(f"a process that tried it ended with {status}")


def _read_as_nobody(files: VisibleFiles) -> None:
    """Become nobody, and raise an error if that could not read the interpreter: without namespaces it stays there."""
    drop_root()
    if not all(os.access(path, os.R_OK) for path in files.paths):
        raise PermissionError("nobody could not read the interpreter")
