"""A sandbox for many tests; where the machine lacks a layer, those that need it are skipped with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trimtab.workers import Sandbox, SandboxError


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    try:
        with Sandbox(workers=2) as made:
            yield made
    except SandboxError as error:
        pytest.skip(str(error))
