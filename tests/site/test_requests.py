"""The site in a real browser: no page asks another host for anything, whatever its scripts do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers.thorough import THOROUGH

TABS = 10  # at once: a page is done when it has asked for nothing for half a second


def asked_elsewhere(page: Any, address: str, names: list[str]) -> list[str]:
    """Open pages; return every request that leaves the site."""
    asked: list[str] = []

    def note(request: Any) -> None:
        if not request.url.startswith((address, "data:", "blob:")):
            asked.append(request.url)

    # Making the index of the search is most of a page's work, and the same on all of them.
    page.context.route("**/search_index.json", lambda route: route.abort())
    page.context.on("request", note)
    for start in range(0, len(names), TABS):
        some = names[start : start + TABS]
        tabs = [page.context.new_page() for _ in some]
        for tab, name in zip(tabs, some, strict=True):
            tab.goto(f"{address}/{name}", wait_until="commit")
        for tab in tabs:
            tab.wait_for_load_state("networkidle")
            tab.close()
    page.context.remove_listener("request", note)
    page.context.unroute("**/search_index.json")
    return asked


def test_no_page_asks_another_host(page: Any, address: str, site: Path) -> None:
    # The pages of programs are alike: one is enough.
    programs = sorted((site / "source").rglob("*.html"))[1:]
    names = [str(path.relative_to(site)) for path in sorted(site.rglob("*.html")) if path not in programs]
    assert len(names) > 40
    # All have the same head and scripts; notebooks and the gallery bring some of their own.
    own = [name for name in names if name.startswith(("index", "notebooks", "gallery"))]
    assert asked_elsewhere(page, address, names if THOROUGH else [*own, *names[::8]]) == []


def test_a_request_by_a_script_is_found(page: Any, tmp_path: Path) -> None:
    from site_pictures import served

    (tmp_path / "index.html").write_text("<script>setTimeout(() => fetch('https://example.org/a.js'))</script>")
    with served(tmp_path) as address:
        assert "https://example.org/a.js" in asked_elsewhere(page, address, ["index.html"])
