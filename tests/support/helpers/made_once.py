"""Folders that all processes of the tests share, each made by the first that needs it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all test processes have in common."""
    root = tmp_path_factory.getbasetemp()
    return root.parent if "PYTEST_XDIST_WORKER" in os.environ else root


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other test processes out during the block."""
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def made_once(root: Path, name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder that the first of all test processes makes."""
    with locked(root / f"{name}.lock"):
        folder = root / name
        if not (root / f"{name}.made").exists():
            folder.mkdir()
            make(folder)
            (root / f"{name}.made").touch()
    return folder
