"""A real Chromium for the tests of the report: every network request is refused and counted, every error kept."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import expect, sync_playwright

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
TIMEOUT_MS = 60_000  # far more than a loaded machine takes: a wait that ends early would fail by chance

expect.set_options(timeout=TIMEOUT_MS)

__all__ = ["CHROMIUM", "Tab", "browser", "expect", "tab"]


@dataclass
class Tab:
    """A page, the network requests that it made, and its console errors."""

    page: Any
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def open(self, report: Path) -> None:
        """Load a report from the disk and wait until all of it is laid out."""
        self.page.goto(report.resolve().as_uri())
        self.page.wait_for_selector("footer")
        # The report of a stress test has no microscope.
        self.page.wait_for_function("document.getElementById('microscope-slot')?.childElementCount !== 0")

    def texts(self, selector: str) -> list[str]:
        """Return the text of every element that a selector matches."""
        return [str(text) for text in self.page.locator(selector).all_text_contents()]

    def quiet(self) -> bool:
        """Return whether nothing was requested and nothing went wrong."""
        return not self.requests and not self.errors


@contextmanager
def browser() -> Iterator[Any]:
    """Start one Chromium for many tabs."""
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        running.close()


@contextmanager
def tab(
    running: Any, width: int = 1280, height: int = 900, scheme: str = "light", server: str = "file:"
) -> Iterator[Tab]:
    """Open a tab with storage of its own; any request but for the file, or to a server, is refused and counted."""
    context = running.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    opened = Tab(page)

    def refuse(route: Any) -> None:
        opened.requests.append(route.request.url)
        route.abort()

    page.route(lambda url: not url.startswith((server, "data:", "blob:")), refuse)
    page.on("console", lambda line: opened.errors.append(line.text) if line.type in {"error", "warning"} else None)
    page.on("pageerror", lambda error: opened.errors.append(str(error)))
    page.on("dialog", lambda dialog: (opened.errors.append(f"dialog {dialog.message}"), dialog.dismiss()))
    try:
        yield opened
    finally:
        context.close()
