"""The site of the documentation, built as `make site` builds it, and its links."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[4]


def build(folder: Path) -> Path:
    """Build the site once for all test processes that share a folder; a warning of mkdocs is an error."""
    site = folder / "site"
    with (folder / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (site / "built").exists():
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
            done = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=600,
                check=False,
            )
            assert done.returncode == 0, done.stdout
            (site / "built").touch()
    return site


class Page(HTMLParser):
    """The links of a page, the files that it loads, and the anchors that others may link to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            if value and tag == "a" and name == "href":
                self.links.append(value)
            elif value and (name == "src" or (tag == "link" and name == "href" and ("rel", "canonical") not in attrs)):
                self.loads.append(value)


def dead_links(site: Path) -> list[str]:
    """Return every link inside the site that leads nowhere, with its page."""
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    dead = []
    for path, page in pages.items():
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            known = pages.get(target)
            # An anchor of a report's page is made by its script.
            if not target.exists() or (parts.fragment and known and unquote(parts.fragment) not in known.anchors):
                dead.append(f"{path.relative_to(site)}: {link}")
    return dead
