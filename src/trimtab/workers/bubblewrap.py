"""Bubblewrap instead of our own namespaces: the same server, but a run starts `bwrap` with a fresh interpreter in it.

Slower, since the interpreter starts and imports anew each time, for sites that trust the tool they know. Bubblewrap
makes the namespaces and mounts; landlock, seccomp, limits and the runner are the same and are applied inside.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from trimtab.workers import runner
from trimtab.workers.jail import SCRATCH, Limits, drop_root, find_walls, give_up_privileges, limit_resources, lock_files
from trimtab.workers.linux import PR_SET_NO_NEW_PRIVS, close_from, landlock_version, prctl
from trimtab.workers.sandbox_server import SandboxServer, receive
from trimtab.workers.seccomp import build_filter
from trimtab.workers.visible_files import DEVICES, VisibleFiles, find_visible_files

# What of trimtab this module imports: it runs inside too.
MODULES = ("__init__.py", "own_parts.py", "process.py", "text.py", "workers")
_ADDRESS_SPACE = 256 << 20  # of an interpreter that has loaded numpy and sympy


class BubblewrapServer(SandboxServer):
    """A fork server whose runs become `bwrap` processes."""

    own_processes = 3  # bwrap, its first process inside, the interpreter

    def become_run(self, handover: socket.socket) -> None:
        """Wait for a program and start bubblewrap with an interpreter that runs it."""
        message, descriptors = receive(handover, 3)
        if not message:
            return
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for target, source in zip((3, 1, 2), descriptors, strict=True):
            os.dup2(source, target)
        os.set_inheritable(3, True)
        close_from(4)
        command = bubblewrap_command(self.walls.files, self.walls.limits, message.decode())
        os.execv(command[0], command)

    def status_of(self, status: int) -> int:
        """Return a signal if bubblewrap tells of one by an exit code."""
        code = os.waitstatus_to_exitcode(status)
        return code - 128 if code > 128 else status


def bubblewrap_command(files: VisibleFiles, limits: Limits, mode: str) -> list[str]:
    """Return the command that starts this module inside, for a run, a session or a probe."""
    root = os.geteuid() == 0
    command = [find_bubblewrap(), "--die-with-parent", "--new-session", "--clearenv", "--chdir", SCRATCH]
    command += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    # Root becomes nobody inside: with a user namespace it would still be root to RLIMIT_NPROC.
    if root:
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user", "--disable-userns"]
    # Bubblewrap mounts in the order given, and an interpreter may lie below /tmp.
    command += ["--perms", "1777", "--size", str(limits.disk_mb << 20), "--tmpfs", SCRATCH]
    # Bubblewrap makes missing folders for root only, and root becomes nobody.
    for folder in _folders_above([*files.paths, *files.links, *DEVICES, __file__]):
        command += ["--perms", "0755", "--dir", folder]
    command += show_files(files)
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for name in MODULES:
        command += ["--ro-bind", os.path.join(package, name), os.path.join(package, name)]
    command += ["--symlink", SCRATCH, "/dev/shm", "--remount-ro", "/"]
    for name, value in {**os.environ, "PYTHONPATH": os.path.dirname(package)}.items():
        command += ["--setenv", name, value]
    options = json.dumps({"limits": asdict(limits), "search_path": files.search_path})
    return [*command, sys.executable, "-P", "-m", "trimtab.workers.bubblewrap", mode, options]


def show_files(files: VisibleFiles) -> list[str]:
    """Return the options that show the visible files and a few devices."""
    options: list[str] = []
    for path in sorted({*files.paths, *files.hidden}):
        options += ["--tmpfs", path] if path in files.hidden else ["--ro-bind", path, path]
    for link, target in files.links.items():
        options += ["--symlink", target, link]
    for device in DEVICES:
        options += ["--dev-bind", device, device]
    return options


def _folders_above(paths: list[str]) -> list[str]:
    """Return all folders on the way to the paths, parents first."""
    found: set[str] = set()
    for path in paths:
        while (path := os.path.dirname(path)) != "/":
            found.add(path)
    return sorted(found)


def find_bubblewrap() -> str:
    """Return the path of `bwrap`; raise an error that says how to get it."""
    path = shutil.which("bwrap")
    if path is None:
        raise FileNotFoundError("bubblewrap is not installed: apt-get install bubblewrap (or dnf, pacman)")
    return path


def run_inside(mode: str, limits: Limits, search_path: list[str]) -> None:
    """Build the other walls around this process, inside bubblewrap's, and run what comes over the channel."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    drop_root()
    lock_files(landlock_version())
    limit_resources(limits, _ADDRESS_SPACE)
    give_up_privileges(build_filter(processes=True))
    sys.path[:] = search_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "trimtab"]:
        del sys.modules[name]
    del os.environ["PYTHONPATH"]
    if mode != "probe":
        runner.run(3, session=mode == "session")


def start_server(requests: socket.socket, options: dict[str, Any]) -> BubblewrapServer:
    """Report what holds on this machine with bubblewrap's namespaces; OSError if it cannot run anything."""
    files = find_visible_files(options["packages"])
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    walls, reasons = find_walls(Limits(**options["limits"]), files, proc, ["namespaces"])
    command = bubblewrap_command(files, walls.limits, "probe")
    tried = subprocess.run(command, capture_output=True, text=True, check=False, errors="replace")
    if tried.returncode:  # each run would end so, and look as if the program had failed
        why = tried.stderr.strip().rpartition("\n")[2][:300]
        raise OSError(f"bubblewrap does not work here ({why}); backend 'fork' says which levels do")
    reasons |= {"namespaces": "", "uid": ""}
    requests.send(json.dumps({"reasons": reasons, "landlock": walls.landlock}).encode())
    return BubblewrapServer(requests, walls, proc)


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    run_inside(sys.argv[1], Limits(**given["limits"]), given["search_path"])
