"""Takes pictures of the built site in a real browser, and those of the gallery that the docs show.

`python tools/site_pictures.py site docs/gallery` writes the gallery's pictures.
`python tools/site_pictures.py site FOLDER PAGE...` writes each page wide and narrow, light and dark, to look at.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from playwright.sync_api import Browser, ViewportSize, sync_playwright

from gallery import RUNS
from shot import CHROMIUM, FLAGS

WIDE: ViewportSize = {"width": 1280, "height": 900}
NARROW: ViewportSize = {"width": 360, "height": 780}
CARD: ViewportSize = {"width": 1280, "height": 830}  # of a report: numbers, summary and the first curves


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a line per request."""

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serve a folder on a free port of this machine: the site's search needs a server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def gallery_pictures(browser: Browser, address: str, folder: Path) -> None:
    """Take the picture of each report of the gallery, at half its size."""
    for name in RUNS:
        page = browser.new_page(viewport=CARD, device_scale_factor=0.5)
        page.goto(f"{address}/gallery/{name}.html")
        page.wait_for_selector("#microscope")
        page.screenshot(path=folder / f"{name}.png")
        page.close()


def page_pictures(browser: Browser, address: str, folder: Path, names: list[str]) -> None:
    """Take four pictures of each page, and say which are wider than the screen."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        for width, size in (("wide", WIDE), ("narrow", NARROW)):
            for scheme in ("light", "dark"):
                page = browser.new_page(viewport=size, color_scheme="dark" if scheme == "dark" else "light")
                page.goto(f"{address}/{name}")
                page.wait_for_load_state("networkidle")
                page.screenshot(path=folder / f"{name.replace('/', '-').removesuffix('.html')}-{width}-{scheme}.png")
                if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                    print(f"{name} is wider than a {width} screen")
                page.close()


if __name__ == "__main__":
    site, out, *pages = sys.argv[1:]
    with served(Path(site)) as where, sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        if pages:
            page_pictures(running, where, Path(out), pages)
        else:
            gallery_pictures(running, where, Path(out))
        running.close()
