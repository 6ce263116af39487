"""One browser for all tests of the report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from helpers.browser.browsing import CHROMIUM, browser


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no chromium: see `make chromium`")
    with browser() as running:
        yield running
