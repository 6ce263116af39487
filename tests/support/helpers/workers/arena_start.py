"""Starts an arena as the user of the tests or as an ordinary one, with secrets in all that a process hands down."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
ORDINARY_USER = 54321
HANG = 400.0  # seconds after which an arena is taken for hung


def outcomes_of(mode: str, share: str, *, ordinary_user: bool) -> list[dict[str, Any]]:
    """Run a share of the attempts and return what became of them."""
    folder = Path(tempfile.mkdtemp(prefix="arena-"))
    try:
        return _run(folder, mode, share, ordinary_user)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(folder: Path, mode: str, share: str, ordinary_user: bool) -> list[dict[str, Any]]:
    given = f"planted-input-{os.urandom(8).hex()}"
    (folder / "input").write_text(given)
    (folder / "home").mkdir()
    (folder / "tmp").mkdir()
    command = [
        sys.executable,
        str(HERE / "arena.py"),
        str(folder),
        mode,
        share,
        f"planted-argument-{os.urandom(8).hex()}",
    ]
    if ordinary_user:
        for path in (folder, *folder.iterdir()):
            os.chown(path, ORDINARY_USER, ORDINARY_USER)
        needed = os.pathsep.join({sys.base_prefix, sys.prefix, str(ROOT)})
        command = [sys.executable, str(HERE / "ordinary_user.py"), str(ORDINARY_USER), needed, *command]
    environment = {
        **os.environ,
        "PLANTED_VARIABLE": f"planted-variable-{os.urandom(8).hex()}",
        "HF_TOKEN": f"planted-token-{os.urandom(8).hex()}",
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests" / "support")]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    inside, outside = os.pipe()
    os.write(outside, given.encode())  # stands unread in what the arena hands down as its input
    with open(folder / "said", "wb") as said:
        process = subprocess.Popen(
            command, stdin=inside, stdout=said, stderr=said, env=environment, cwd=folder, start_new_session=True
        )
        try:
            process.wait(HANG)
        finally:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(inside)
            os.close(outside)
    words = (folder / "said").read_text(errors="replace")
    assert process.returncode == 0, f"the arena ended with {process.returncode}:\n{words[-3000:]}"
    outcomes: list[dict[str, Any]] = json.loads((folder / "outcomes.json").read_text())
    return outcomes
