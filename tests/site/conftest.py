"""One build of the site for all its tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

# A machine with a GPU may lack mkdocs; its other tests are still collected.
collect_ignore_glob = [] if importlib.util.find_spec("mkdocs") else ["test_*.py"]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The built site; workers share it."""
    from helpers.site.building import build

    base = tmp_path_factory.getbasetemp()
    return build(base if worker_id == "master" else base.parent)
