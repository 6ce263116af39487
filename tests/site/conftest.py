"""One build of the site for all its tests, and a browser to read it with."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# A machine with a GPU may lack mkdocs; its other tests are still collected.
collect_ignore_glob = [] if importlib.util.find_spec("mkdocs") else ["test_*.py"]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The built site; workers share it."""
    from helpers.site.building import build

    base = tmp_path_factory.getbasetemp()
    return build(base if worker_id == "master" else base.parent)


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served."""
    pytest.importorskip("playwright")
    from site_pictures import served

    with served(site) as address:
        yield address


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    """A page of a real browser."""
    pytest.importorskip("playwright")
    from helpers.browser.browsing import CHROMIUM, TIMEOUT_MS, browser

    if CHROMIUM is None:
        pytest.skip("no chromium: see `make chromium`")
    with browser() as running:
        page = running.new_context(viewport={"width": 1280, "height": 900}).new_page()
        page.set_default_timeout(TIMEOUT_MS)
        yield page
