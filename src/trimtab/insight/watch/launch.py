"""Start `trimtab watch`: by itself, or beside a run that `trimtab train --watch` starts."""

from __future__ import annotations

import asyncio
import os
import secrets
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trimtab.loopback import LOOPBACK, listen
from trimtab.process import STOP_AT_INPUT_END
from trimtab.text import PrintLine, shown

HANDED_OVER = "TRIMTAB_WATCH"  # the listening socket and the token that `train --watch` gives to its server
DEEPEST = 3  # folders: those of comparisons and stress tests hold their runs
MOST_RUNS = 40
STOP_SECONDS = 8.0


def newest_run(folder: Path = Path("runs")) -> Path:
    """Return the run below a folder whose files changed last."""
    from trimtab.insight.report.run_files import CONTENTS

    found: list[tuple[float, Path]] = []
    for path, folders, files in os.walk(folder):
        here = Path(path)
        if {"config.toml", "metrics.jsonl"} & set(files) or "tokens" in folders:
            names = [here / name for name in CONTENTS if (here / name).exists()]
            found.append((max(each.stat().st_mtime for each in names), here))
            folders.clear()
        elif len(here.relative_to(folder).parts) >= DEEPEST:
            folders.clear()
        folders[:] = [name for name in folders if not name.startswith(".")]
    if not found:
        raise ValueError(f"{shown(str(folder), 300)} has no runs: name one, as in `trimtab watch RUN`")
    return max(found)[1]


def watch(runs: Sequence[Path], port: int, print_line: PrintLine) -> None:
    """Serve runs until Ctrl-C, or until the run that this server was started beside ends."""
    given = os.environ.pop(HANDED_OVER, "")
    if len(runs) > MOST_RUNS:
        raise ValueError(f"{len(runs)} runs are too many for one page: at most {MOST_RUNS}")
    if given:
        descriptor, _, token = given.partition(":")
        listener = socket.socket(fileno=int(descriptor))
    else:
        for run in runs:
            check_run(run)
        token = secrets.token_urlsafe(32)
        try:
            listener = listen(port)
        except OSError as error:
            raise ValueError(f"--port {port} cannot be used: {error.strerror or error}") from None
        print_line(f"watching {', '.join(str(run) for run in runs)}; Ctrl-C ends the page, and no run")
        print_line(address(listener, token))
    with suppress(KeyboardInterrupt):
        if given:  # until somebody opens the page: the imports below take seconds of a core, which the run may need
            select.select([listener], [], [])
        from trimtab.insight.watch.server import WatchServer
        from trimtab.insight.watch.watched_run import WatchedRun

        asyncio.run(WatchServer([WatchedRun(run) for run in runs], token).serve(listener))


def check_run(run: Path) -> None:
    """Raise if a folder holds no run."""
    from trimtab.insight.report.run_files import CONTENTS, holds_run

    if not run.is_dir():
        raise ValueError(f"{run} is no run: {'a run is a folder' if run.exists() else 'there is no such folder'}")
    if not holds_run(run):
        raise ValueError(f"{run} is no run: it has none of {', '.join(CONTENTS)}")


def address(listener: socket.socket, token: str) -> str:
    """Return the address of the page."""
    return f"http://{LOOPBACK}:{listener.getsockname()[1]}/?token={token}"


@dataclass
class WatchProcess:
    """The server beside a run, in a process of its own: its end does not touch the run."""

    process: subprocess.Popen[bytes]
    address: str

    def stop(self) -> str:
        """End the server, after it has told open pages how the run ended; return what went wrong, if anything."""
        assert self.process.stdin is not None
        early = self.process.poll()
        with suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:  # a disk that does not answer
            self.process.kill()
            self.process.wait()
        return f"the page of the run ended early, with exit code {early}; the run was not affected" if early else ""


def start_watch(run: Path) -> WatchProcess:
    """Start the server of a run that is about to begin. It ends with this process, however that ends."""
    token = secrets.token_urlsafe(32)
    with listen() as listener:  # here, so that the address is known at once
        where = address(listener, token)
        # Not in the arguments, which every user of the machine can read.
        environment = {
            **os.environ,
            HANDED_OVER: f"{listener.fileno()}:{token}",
            STOP_AT_INPUT_END: "1",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trimtab", "watch", str(run)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C in the terminal is for the run, which ends after its step
        )
    return WatchProcess(process, where)
