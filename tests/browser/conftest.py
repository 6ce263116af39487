"""One browser for all tests of the report."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

# A machine with a GPU may lack playwright; its other tests are still collected.
collect_ignore_glob = [] if importlib.util.find_spec("playwright") else ["test_*.py"]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    from helpers.browser.browsing import CHROMIUM, browser

    if CHROMIUM is None:
        pytest.skip("no chromium: see `make chromium`")
    with browser() as running:
        yield running
