"""Takes pictures of the page of `trimtab watch`: light, dark, on a phone, and of the responses.

`python tools/shot_watch.py RUN docs` writes watch.png and watch-responses.png; with --all also watch-dark.png and
watch-phone.png, which are for looking and not for keeping. Several runs, separated by commas, are compared.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from shot import CHROMIUM, FLAGS, PHONE, WIDE

ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+/\?token=\S+")
PATIENCE = 120_000  # milliseconds


@contextmanager
def served(runs: list[str]) -> Iterator[str]:
    """Serve runs, and yield the address of their page."""
    command = [sys.executable, "-P", "-m", "trimtab", "watch", *runs]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield next(match[0] for line in process.stdout if (match := ADDRESS.search(line)))
        process.terminate()


def shoot(runs: list[str], folder: Path, everything: bool = False) -> list[Path]:
    """Take the pictures."""
    made = []
    looks = [("", "light", WIDE)] + [("-dark", "dark", WIDE), ("-phone", "light", PHONE)] * everything
    with served(runs) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for suffix, scheme, size in looks:
            page = browser.new_page(viewport=size, color_scheme="dark" if scheme == "dark" else "light")
            page.set_default_timeout(PATIENCE)
            page.goto(address)
            page.wait_for_selector("table.responses tbody tr")
            made.append(_picture(page, folder / f"watch{suffix}.png"))
            if not suffix or everything:
                page.evaluate("document.getElementById('responses').scrollIntoView()")
                made.append(_picture(page, folder / f"watch-responses{suffix}.png"))
            page.close()
        browser.close()
    return made


def _picture(page: Page, path: Path) -> Path:
    page.wait_for_timeout(500)
    page.screenshot(path=path)
    return path


if __name__ == "__main__":
    for picture in shoot(sys.argv[1].split(","), Path(sys.argv[2]), everything="--all" in sys.argv):
        print(f"{picture}: {picture.stat().st_size / 1000:.0f} kB")
