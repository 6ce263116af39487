"""What the sandbox says: how a run ended, what holds on this machine, and what is missing."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trimtab.workers.jail import STAYS_ROOT
from trimtab.workers.runner import EXIT_MEMORY

Kind = Literal["ok", "exception", "timeout", "memory", "output", "killed", "refused"]
KILLED_KINDS: tuple[Kind, ...] = ("timeout", "memory", "output", "killed")


class SandboxError(OSError):
    """The sandbox cannot do what was asked on this machine; the message says what is missing and how to get it."""


@dataclass(frozen=True)
class Result:
    """What became of a program.

    `stdout` is what it printed, cut at the limit, with invalid bytes replaced. `error` is what it wrote to standard
    error (warnings, the traceback as Python prints it), and why it was killed or refused. `ms` is the wall-clock time
    of the run in milliseconds.
    """

    stdout: str
    error: str
    kind: Kind
    ms: float


def refused(why: str) -> Result:
    """Return the result of a program that was not run."""
    return Result("", why, "refused", 0.0)


def kind_of(status: int) -> tuple[Kind, str]:
    """Return what a process's wait status means, and in words if it says more than the traceback."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return "killed", f"killed by {signal.Signals(number).name}"
    return kind_of_exit(os.WEXITSTATUS(status))


def kind_of_exit(code: int) -> tuple[Kind, str]:
    """Return what an exit code of the runner means."""
    if code == 0:
        return "ok", ""
    return ("memory", "") if code == EXIT_MEMORY else ("exception", f"the program ended with exit code {code}")


def text_of(data: bytes) -> str:
    """Decode output; bytes that are not UTF-8 are replaced."""
    return data.decode("utf-8", "replace")


# The layers that each level needs, the strongest first. All layers that hold are used, at any level.
LEVELS: dict[str, tuple[str, ...]] = {
    "full": ("namespaces", "landlock", "seccomp"),
    "namespaces": ("namespaces", "seccomp"),
    "filters": ("landlock", "seccomp"),
    "limits": (),
}

_PROMISES = {
    "full": "all layers",
    "namespaces": "no second wall around files",
    "filters": "no file to write to and no processes; other processes and the network are closed off by filters only",
    "limits": "no sandbox: time, memory and output are limited, but a program can do what this user can",
}


@dataclass(frozen=True)
class Probe:
    """Why each layer does not hold on this machine, empty if it does."""

    reasons: Mapping[str, str]
    landlock: int = 0

    @property
    def level(self) -> str:
        """The strongest level whose layers all hold."""
        return next(name for name, layers in LEVELS.items() if not any(self.reasons[layer] for layer in layers))

    def line(self) -> str:
        """Say what holds, in a line."""
        found = {
            "namespaces": "namespaces (user, mount, pid, network, ipc, uts, cgroup)",
            "landlock": f"landlock {self.landlock}",
            "seccomp": "seccomp",
        }
        parts = [words if not self.reasons[name] else f"no {name}" for name, words in found.items()]
        user = "uid dropped" if os.geteuid() == 0 and not self.reasons["uid"] else "no root" if os.geteuid() else "root"
        return f"level {self.level} ({_PROMISES[self.level]}): {', '.join([*parts, 'rlimits', user])}"

    def missing(self) -> list[str]:
        """Say for each layer that does not hold why, and how to get it."""
        return [f"{name}: {why}; {_advice(name, why)}" for name, why in self.reasons.items() if why]

    def require(self, level: str) -> None:
        """Raise an error if the machine offers less than a level."""
        names = list(LEVELS)
        if names.index(self.level) <= names.index(level):
            return
        needed = [text for text in self.missing() if text.partition(":")[0] in LEVELS[level]]
        raise SandboxError(
            f"this machine offers level {self.level!r} of the sandbox ({_PROMISES[self.level]}), not {level!r}. "
            f"Missing: {'. '.join(needed)}. To run model-written code all the same, ask for level={self.level!r}"
        )


def _advice(layer: str, why: str) -> str:
    """Say how to get a layer."""
    if layer == "uid" or STAYS_ROOT in why:
        return "run it as another user, or as root with CAP_SETUID and CAP_SETGID and an interpreter that all can read"
    if layer == "landlock":
        return "it needs Linux 5.13 with landlock among the kernel's security modules (boot with lsm=landlock,...)"
    if layer == "seccomp":
        return "it needs a kernel with CONFIG_SECCOMP_FILTER on x86_64 or aarch64"
    if os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv"):
        return "start the container with --security-opt seccomp=unconfined --security-opt apparmor=unconfined"
    for name, wanted in (
        ("kernel/apparmor_restrict_unprivileged_userns", "0"),  # Ubuntu
        ("kernel/unprivileged_userns_clone", "1"),  # Debian's older kernels
    ):
        path = f"/proc/sys/{name}"
        if os.path.exists(path) and open(path, encoding="ascii").read().strip() != wanted:  # noqa: SIM115
            return f"allow user namespaces: sysctl {name.replace('/', '.')}={wanted}"
    return "allow user namespaces: sysctl user.max_user_namespaces=10000"
