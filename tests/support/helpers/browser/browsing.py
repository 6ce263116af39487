"""A real Chromium for the tests of the report: no network at all, and every complaint of the page is kept."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: see `make chromium`")


@dataclass
class Tab:
    """A page, what it asked of the network, and what it complained of."""

    page: Any
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def open(self, report: Path) -> None:
        """Load a report from the disk and wait until all of it is there."""
        self.page.goto(report.resolve().as_uri())
        self.page.wait_for_selector("footer")
        self.page.wait_for_function("document.getElementById('scope-slot').childElementCount > 0")

    def texts(self, selector: str) -> list[str]:
        """What elements say."""
        return [str(text) for text in self.page.locator(selector).all_text_contents()]

    def quiet(self) -> bool:
        """Whether nothing was asked for and nothing went wrong."""
        return not self.requests and not self.complaints


@contextmanager
def browser() -> Iterator[Any]:
    """One Chromium for many tabs."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        running.close()


@contextmanager
def tab(running: Any, width: int = 1280, height: int = 900, scheme: str = "light") -> Iterator[Tab]:
    """A tab of its own; anything but the file itself is refused and counted."""
    context = running.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(60_000)
    opened = Tab(page)

    def refuse(route: Any) -> None:
        opened.requests.append(route.request.url)
        route.abort()

    page.route(lambda url: not url.startswith(("file:", "data:")), refuse)
    page.on("console", lambda said: opened.complaints.append(said.text) if said.type in {"error", "warning"} else None)
    page.on("pageerror", lambda error: opened.complaints.append(str(error)))
    page.on("dialog", lambda dialog: (opened.complaints.append(f"dialog {dialog.message}"), dialog.dismiss()))
    yield opened
    context.close()
