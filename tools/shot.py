"""Takes pictures of a report in a real browser: light, dark, on a phone, and through the microscope.

`python tools/shot.py REPORT.html docs` writes report.png, report-dark.png, report-phone.png and report-microscope.png,
of a stress test stress.png, stress-dark.png and stress-phone.png, of a run with tools report-conversation.png too.
"""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import Page, ViewportSize, sync_playwright

CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars",
]  # fmt: skip
WIDE: ViewportSize = {"width": 1280, "height": 1010}
PHONE: ViewportSize = {"width": 360, "height": 780}
STRESS: ViewportSize = {"width": 1280, "height": 1160}  # down to the curves of accuracy, for two objectives
LOADED = "#microscope, #configuration, .survival"


def shoot(report: Path, folder: Path, full: bool = False) -> list[Path]:
    """All pictures of a report; `full` takes whole pages, which are for looking and not for keeping."""
    made = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for suffix, scheme, size in (("", "light", WIDE), ("-dark", "dark", WIDE), ("-phone", "light", PHONE)):
            page = browser.new_page(viewport=size, color_scheme="dark" if scheme == "dark" else "light")
            page.goto(report.resolve().as_uri())
            page.wait_for_selector(LOADED)
            stress = page.locator(".survival").count() > 0
            if stress and size == WIDE:
                page.set_viewport_size(STRESS)
            made.append(_picture(page, folder / f"{'stress' if stress else 'report'}{suffix}.png", full))
            page.close()
        page = browser.new_page(viewport=WIDE)
        page.goto(report.resolve().as_uri())
        page.wait_for_selector(LOADED)
        calls = page.locator(".row", has_text="call").filter(has_text="correct")
        if calls.count():
            calls.last.click()
            page.get_by_label("Colour by").select_option("surprisal")
            page.evaluate("document.getElementById('microscope').scrollIntoView()")
            made.append(_picture(page, folder / "report-conversation.png", False))
            page.reload()
            page.wait_for_selector(LOADED)
        if page.locator("#microscope .tok").count():
            page.get_by_label("Colour by").select_option("surprisal")
            page.get_by_label("Compare with").select_option(label="sspo")
            page.get_by_label("mark segments").check()
            page.evaluate("document.getElementById('microscope').scrollIntoView()")
            made.append(_picture(page, folder / "report-microscope.png", False))
        browser.close()
    return made


def _picture(page: Page, path: Path, full: bool) -> Path:
    page.wait_for_timeout(400)
    page.screenshot(path=path, full_page=full)
    return path


if __name__ == "__main__":
    for picture in shoot(Path(sys.argv[1]), Path(sys.argv[2]), full="--full" in sys.argv):
        print(f"{picture}: {picture.stat().st_size / 1000:.0f} kB")
