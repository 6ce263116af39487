"""A sandbox for many tests; where the machine lacks a layer, those that need it are skipped with the reason."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trimtab.tools import Sandbox, SandboxError


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs walls where the interpreter lies below /tmp: programs see an empty folder there."""
    if os.path.realpath(sys.prefix).startswith("/tmp/"):
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="the interpreter lies below /tmp"))


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    try:
        with Sandbox(workers=2) as made:
            yield made
    except SandboxError as error:
        pytest.skip(str(error))
