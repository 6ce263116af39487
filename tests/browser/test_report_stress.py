"""The page of a stress test in a real browser: who survives what, for eyes, screen readers and small screens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.browser.browsing import Tab, tab
from helpers.browser.contrast import COLORS, contrast
from helpers.browser.hostile_texts import HOSTILE
from helpers.stress.made_stress import FELL, made_stress
from helpers.thorough import THOROUGH
from trimtab.insight.report import write_report
from trimtab.insight.report.embed import truncated, visible
from trimtab.insight.report.page import LONGEST_NAME
from trimtab.record import COLLAPSE_DEFINITION

AT_ONCE = 12  # hostile texts of one page


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report([made_stress(tmp_path_factory.mktemp("stress"))])


@pytest.fixture
def opened(chromium: Any, page: Path) -> Iterator[Tab]:
    with tab(chromium) as opened:
        opened.open(page)
        yield opened
        assert opened.quiet(), (opened.requests, opened.errors)


def test_the_page_begins_with_who_held_longest_and_a_map_of_who_survives_what(opened: Tab) -> None:
    assert opened.texts("h1") == ["Stress test of demo"]
    assert opened.texts(".summary-text")[0].startswith("update.lr was pushed from 3e-4 to 3e-3: ")
    assert opened.texts(".survival thead tr:last-child th") == ["objective", "3e-4", "1e-3", "3e-3"]
    rows = opened.page.locator(".survival tbody tr")
    assert rows.count() == 2 and rows.nth(1).locator("th").inner_text() == "sspo + s2t"
    cells = [" ".join(text.split()) for text in rows.nth(0).locator("td").all_inner_texts()]
    assert cells == [
        "3/3 81.0% right ✓ survives",
        "2/3 54.0% right ✓ most survive margin",
        "0/3 1.0% right ✕ collapsed",
    ]
    assert opened.page.locator(".margin-cell").count() == 2
    assert "seed 2: collapsed at step 12" in rows.nth(0).locator("td").nth(2).get_attribute("title")


def test_there_is_a_chart_for_every_stress_all_on_the_same_scales(opened: Tab) -> None:
    charts = opened.page.locator(".grid.small figure")
    assert charts.count() == 6
    for first in (0, 3):
        ticks = [charts.nth(n).locator("text.tick").all_inner_texts() for n in range(first, first + 3)]
        assert ticks[0] == ticks[1] == ticks[2] and len(ticks[0]) > 4
    assert charts.nth(2).locator("h3").inner_text().startswith("update.lr = 3e-3")
    assert charts.nth(2).locator(".meaning").inner_text() == "grpo: 0/3, collapsed; sspo + s2t: 1/2, too few survive"
    assert [charts.nth(n).locator("path.line").count() for n in range(3)] == [2, 2, 2]
    assert [charts.nth(n).locator("path.thin").count() for n in range(3)] == [6, 6, 5]
    assert [charts.nth(n).locator(".cross-mark").count() for n in range(3)] == [0, 1, 4]
    assert f"collapsed at step {FELL}" in charts.nth(1).locator(".cross-mark title").text_content()


def test_pointing_at_one_chart_reads_all_of_them(opened: Tab) -> None:
    opened.page.locator(".grid.small svg.chart").first.focus()
    opened.page.keyboard.press("Home")
    assert set(opened.texts(".grid.small h3 .at")) == {"step 0"}


def test_the_margins_stand_in_words_and_in_a_table(opened: Tab) -> None:
    assert opened.texts(".sentences li")[0].startswith("grpo holds up to update.lr = 1e-3 (2 of 3 seeds survive")
    assert opened.texts(".margins tbody tr:first-child > *")[:2] == ["grpo", "1e-3 [3e-4, 1e-3]"]
    assert COLLAPSE_DEFINITION in opened.texts(".words dd")
    assert opened.page.locator("#runs tbody tr").count() == 18
    assert opened.texts("nav a") == ["update.lr", "What the words mean", "Runs", "Command"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(chromium: Any, page: Path, scheme: str) -> None:
    with tab(chromium, scheme=scheme) as opened:
        opened.open(page)
        opened.page.locator("#runs summary").click()
        for selector in (".verdict-cell", ".verdict-cell *", "p", "h3", "li", "td", "th", "dd", "dt", ".swatch"):
            colors = opened.page.evaluate(COLORS, f"main {selector}")
            assert colors
            assert all(contrast(ink, paper) >= 4.5 for ink, paper in colors), selector


def test_a_narrow_screen_is_never_scrolled_sideways(chromium: Any, page: Path) -> None:
    with tab(chromium, width=360, height=780) as opened:
        opened.open(page)
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= 360
        assert opened.page.locator(".survival tbody th").first.bounding_box()["height"] < 150
        assert opened.quiet()


@pytest.mark.parametrize("first", range(len(HOSTILE) // AT_ONCE if THOROUGH else 1))
def test_hostile_names_are_shown_as_text(chromium: Any, tmp_path: Path, first: int) -> None:
    texts = [text for text in HOSTILE[first :: len(HOSTILE) // AT_ONCE] if text.strip()]
    names = tuple(dict.fromkeys(texts))
    folder = made_stress(tmp_path, {text: ("10?",) * len(names) for text in names}, names, key=names[0])
    stored = json.loads((folder / "stress.json").read_text())
    for run, text in zip(stored["runs"], names, strict=False):
        run["end"] = run["folder"] = run["why"] = text
    (folder / "stress.json").write_text(json.dumps({**stored, "command": names, "recipe": names[1]}))
    with tab(chromium) as opened:
        opened.open(write_report([folder]))
        opened.page.locator("#runs summary").click()
        rows, heads = opened.texts(".survival tbody th"), opened.texts(".survival thead tr:last-child th")[1:]
        assert rows == [visible(truncated(text, LONGEST_NAME)) for text in names] and heads == rows
        shown = re.sub(r"\s+", " ", " ".join(opened.texts("main")))
        for text in names:
            assert re.sub(r"\s+", " ", visible(text))[:100].strip() in shown
        assert opened.page.evaluate("typeof window.canary") == "undefined"
        assert opened.page.locator("iframe, object, embed, base, form, link, math, audio, video, img").count() == 0
        assert opened.quiet(), (opened.requests, opened.errors)


def test_a_test_of_which_nothing_has_finished_still_gives_a_page(chromium: Any, tmp_path: Path) -> None:
    with tab(chromium) as opened:
        opened.open(write_report([made_stress(tmp_path, {"1": ("??", "?")})]))
        assert opened.texts(".summary-text") == ["update.lr: no run has finished yet."]
        assert len(opened.texts(".note li")) == 3 and opened.page.locator(".grid.small").count() == 0
        assert opened.quiet()
