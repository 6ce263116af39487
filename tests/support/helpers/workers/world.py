"""The world outside the sandbox, with secrets in it and traps that tell when something from inside has touched it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import sqlite3
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from helpers.workers.processes import Process, descendants, processes, standing

SETTLED = 20  # looks at the process table that agree
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p


def secret(name: str) -> str:
    """Make up a secret that is recognised wherever it turns up."""
    return f"planted-{name}-{secrets.token_hex(8)}"


class World:
    """Files, variables, sockets, memory, a terminal and a process that a program must not reach."""

    def __init__(self, folder: Path, secrets_given: dict[str, str], terminal: tuple[int, str]) -> None:
        self.folder, self.secrets = folder, dict(secrets_given)
        self.marker = "esc" + secrets.token_hex(5)  # 13 characters: a process's name has room for 15
        self.tag = "ESCAPED-" + secrets.token_hex(8)
        self.home, self.wide = Path(os.environ["HOME"]), folder / "wide"
        self._keyboard, self.terminal = terminal
        self._plant_files()
        self._memory = ctypes.create_string_buffer(self._new_secret("memory").encode(), 128)
        self._scratch = ctypes.create_string_buffer(b"as it was", 128)
        self.ipc_key = int(self.marker[3:10], 16)
        self._segment()
        self.bystander: subprocess.Popen[str] | None = None
        self._start_bystander()
        self.before = self._tree()
        self.known = 0

    def _new_secret(self, name: str) -> str:
        self.secrets[name] = secret(name)
        return self.secrets[name]

    def _plant_files(self) -> None:
        self.wide.mkdir()
        self.wide.chmod(0o777)
        (self.folder / "secret.txt").write_text(self._new_secret("file") + "\n")
        (self.folder / "secret_module.py").write_text(f"SECRET = {self._new_secret('module')!r}\n")
        (self.folder / "victim.txt").write_text("as it was\n")
        with contextlib.closing(sqlite3.connect(self.folder / "kept.db")) as database:
            database.execute("create table kept (text)")
            database.execute("insert into kept values (?)", (self._new_secret("database"),))
            database.commit()
        for name in (".cache/huggingface/token", ".ssh/id_ed25519", ".netrc", ".bashrc"):
            path = self.home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self._new_secret("home " + path.name))
        self.shared_file = Path(f"/dev/shm/trimtab-{self.marker[3:]}")
        self.shared_file.write_text(self._new_secret("shared file"))
        # Inherited by everyone who does not close what was open: a file with a secret, and the folder around it.
        for path in (self.folder / "secret.txt", self.folder):
            os.set_inheritable(os.open(path, os.O_RDONLY), True)

    def _segment(self) -> None:
        self.segment = libc.shmget(0, 4096, 0o1666)
        self._attached = libc.shmat(self.segment, None, 0)
        text = self.secrets.get("segment") or self._new_secret("segment")
        ctypes.memmove(self._attached, text.encode(), len(text))

    def _start_bystander(self) -> None:
        for name in ("socket", "datagrams"):
            (self.folder / name).unlink(missing_ok=True)
        self.abstract = f"trimtab-{secrets.token_hex(6)}"
        command = [
            sys.executable,
            "-I",
            "-S",
            str(Path(__file__).parent / "bystander.py"),
            str(self.folder),
            self.abstract,
        ]
        environment = {**os.environ, "BYSTANDER_SECRET": self.secrets.get("server") or self._new_secret("server")}
        self.bystander = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, close_fds=True
        )
        assert self.bystander.stdout is not None
        self.ports = json.loads(self.bystander.stdout.readline())
        self._standing = {pid: standing(pid) for pid in (os.getpid(), self.bystander.pid)}
        self._own = self._own_state()

    def facts(self, sandboxed: bool) -> dict[str, Any]:
        """Return all that an attacker may know: everything but the secrets."""
        assert self.bystander is not None
        return {
            **{"outside": str(self.folder), "wide": str(self.wide), "home": str(self.home), "terminal": self.terminal},
            **{"secret_file": str(self.folder / "secret.txt"), "secret_module": str(self.folder / "secret_module.py")},
            **{"victim": str(self.folder / "victim.txt"), "database": str(self.folder / "kept.db")},
            **{"parent": os.getpid(), "parent_group": os.getpgrp(), "bystander": self.bystander.pid},
            **{"address": ctypes.addressof(self._memory), "scratch": ctypes.addressof(self._scratch)},
            **{"tcp": self.ports["tcp"], "tcp6": self.ports["tcp6"], "udp": self.ports["udp"], "free_port": 0},
            **{"unix": f"{self.folder}/socket", "unix_datagram": f"{self.folder}/datagrams", "abstract": self.abstract},
            **{"segment": self.segment, "ipc_key": self.ipc_key, "marker": self.marker, "tag": self.tag},
            **{"site_packages": sysconfig.get_path("purelib"), "sandboxed": sandboxed},
        }

    # --- what has changed outside ---

    def signs(self) -> list[str]:
        """Return what has been touched from inside since the last call, and put it in order again."""
        found = self._process_signs()
        found += self._file_signs()
        found += self._memory_signs()
        own = self._own_state()
        if own != self._own:
            found.append(f"the parent has changed: {self._own} is now {own}")
            self._own = own
        typed = b""
        with contextlib.suppress(BlockingIOError):
            typed = os.read(self._keyboard, 65536)
        if typed:
            found.append(f"written on the terminal: {typed[:80]!r}")
        return found

    def remember_processes(self) -> None:
        """Take the processes that run now for those that belong there, once their number has settled."""
        counts = [len(descendants(os.getpid()))]
        while len(counts) < SETTLED or len(set(counts[-SETTLED:])) > 1:  # a runner may prepare the next run
            counts.append(len(descendants(os.getpid())))
            time.sleep(0.01)
        self.known = counts[-1]

    def left_processes(self, patience: float) -> list[Process]:
        """Wait until no more processes run than belong there; return all of them if that does not happen."""
        end = time.monotonic() + patience
        while True:
            table = processes()
            now = descendants(os.getpid(), table)
            named = [process for process in table if process.name == self.marker and process.state != "Z"]
            if len(now) <= self.known and not named:
                return []
            if time.monotonic() > end:
                return sorted({*now, *named})
            time.sleep(0.01)

    def end_strangers(self, keep: set[int]) -> None:
        """Kill what a bare program left: all that descends from here and does not belong here."""
        assert self.bystander is not None
        for _ in range(50):
            strangers = [p for p in descendants(os.getpid()) if p.pid not in {*keep, self.bystander.pid}]
            for process in strangers:
                with contextlib.suppress(OSError):
                    os.kill(process.pid, signal.SIGKILL)
            if not strangers:
                break
            time.sleep(0.01)
        for process in processes():
            if process.parent == os.getpid() and process.state == "Z":
                with contextlib.suppress(OSError):
                    os.waitpid(process.pid, os.WNOHANG)

    def _process_signs(self) -> list[str]:
        assert self.bystander is not None and self.bystander.stdin is not None and self.bystander.stdout is not None
        found = []
        try:
            state = standing(self.bystander.pid)
            if state["state"] == "runs":
                self.bystander.stdin.write("report\n")
                self.bystander.stdin.flush()
                found += json.loads(self.bystander.stdout.readline())
        except (OSError, ValueError):
            found.append("a process outside was killed")
        else:
            for pid, before in self._standing.items():
                if standing(pid) != before:
                    found.append(f"process {pid} outside has changed: {before} is now {standing(pid)}")
        if found:
            with contextlib.suppress(OSError):  # only root takes a lower priority back
                os.setpriority(os.PRIO_PROCESS, 0, 0)
            self.bystander.kill()
            self.bystander.communicate()
            self._start_bystander()
        return found

    def _file_signs(self) -> list[str]:
        found = []
        now = self._tree()
        if now != self.before:
            changed = [path for path in {*now, *self.before} if now.get(path) != self.before.get(path)]
            found.append(f"files outside have changed: {changed[:5]}")
            self._restore_files(now)
        for folder in self._places():
            with contextlib.suppress(OSError):
                for name in os.listdir(folder):
                    if self.marker in name:
                        found.append(f"left {folder}/{name}")
                        self._remove(Path(folder, name))
        return found

    def _places(self) -> set[str]:
        """Folders in which a file could have been left."""
        python = sysconfig.get_paths()
        groups = [str(path) for path in Path("/sys/fs/cgroup").glob("*")] + ["/sys/fs/cgroup"]
        system = ["/", "/etc", "/usr/local/bin", "/var/spool", "/run", "/root", "/home", "/opt", "/srv", "/lib"]
        temporary = ["/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", os.environ["TMPDIR"], os.getcwd()]
        standard = [python["stdlib"], python["stdlib"] + "/__pycache__", python["stdlib"] + "/json/__pycache__"]
        homes = [self.home, *(self.home / name for name in (".profile.d", ".config", ".local/lib"))]
        packages = [python["purelib"], sys.prefix, *sys.path, os.path.dirname(sys.executable)]
        return {*groups, *system, *temporary, *standard, *map(str, homes), *packages}

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                os.chmod(path, 0o700)
                shutil.rmtree(path, ignore_errors=True)
                if path.exists():
                    path.rmdir()  # a control group's folder is removed, its files are not
            else:
                path.unlink()

    def _tree(self) -> dict[str, tuple[object, ...]]:
        """What stands in the folder outside: name, kind and mode, owner, time, content."""
        found = {}
        for path in sorted(self.folder.rglob("*")):
            # The temporary folder of the sandbox's own process, and what the arena prints.
            if path.is_relative_to(self.folder / "tmp") or path == self.folder / "said":
                continue
            try:
                state = path.lstat()
                content = path.read_bytes() if path.is_file() else b""
            except OSError:
                continue
            changed = state.st_mtime_ns if path.is_file() and path.suffix != ".db" else 0
            name = str(path.relative_to(self.folder))
            found[name] = (state.st_mode, state.st_uid, changed, content)
        return found

    def _restore_files(self, now: dict[str, tuple[object, ...]]) -> None:
        for name in now:
            if name not in self.before:
                self._remove(self.folder / name)
        victim = self.folder / "victim.txt"
        victim.unlink(missing_ok=True)
        victim.write_text("as it was\n")
        if (
            not (self.folder / "secret.txt").exists()
            or (self.folder / "secret.txt").read_text() != self.secrets["file"] + "\n"
        ):
            (self.folder / "secret.txt").write_text(self.secrets["file"] + "\n")
        self.before = self._tree()

    def _memory_signs(self) -> list[str]:
        found = []
        if self._scratch.value != b"as it was":
            found.append("the parent's memory was written")
            self._scratch.value = b"as it was"
        for name, remove in (("shm", libc.shmctl), ("msg", libc.msgctl), ("sem", libc.semctl)):
            for line in Path(f"/proc/sysvipc/{name}").read_text().splitlines()[1:]:
                key, number, *_ = line.split()
                if int(key) == self.ipc_key:
                    found.append(f"left an object of System V: {name}")
                    remove(int(number), *((0, 0) if name == "sem" else (0, None)))
        if self.marker in Path("/proc/net/unix").read_text():
            found.append("left an abstract socket")
        with contextlib.suppress(OSError):
            if self.marker in Path("/proc/keys").read_text():
                found.append("left a key")
        if libc.shmctl(self.segment, 2, ctypes.create_string_buffer(256)) != 0 or not self._segment_is_whole():
            found.append("the parent's segment was removed")
            self._segment()
        return found

    def _segment_is_whole(self) -> bool:
        # A removed segment stays attached: its mode then says that it waits for its last user.
        for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]:
            if int(line.split()[1]) == self.segment:
                return not int(line.split()[2], 8) & 0o1000
        return False

    def _own_state(self) -> dict[str, object]:
        mask = os.umask(0o22)
        os.umask(mask)
        status = Path("/proc/self/status").read_text()
        signals = [line for line in status.splitlines() if line.startswith(("SigBlk", "SigIgn"))]
        return {"folder": os.getcwd(), "mask": mask, "signals": signals, "names": sorted(os.environ)}

    def close(self) -> None:
        """Take away what was planted outside its folder."""
        assert self.bystander is not None
        self.bystander.kill()
        self.bystander.communicate()
        self.shared_file.unlink(missing_ok=True)
        libc.shmctl(self.segment, 0, None)
