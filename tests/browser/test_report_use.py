"""A report by keyboard, in the dark, on a phone, with a response of 15,000 tokens, and of several runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.browser.browsing import Tab, tab
from helpers.browser.contrast import COLORS, contrast
from helpers.insight.report_runs import PIECES, Made, make_run
from trimtab.insight.report import write_report

LONG = 15_000


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("use") / "run", Made(steps=3, lengths=(60, 5, 12, 7)))
    return write_report([run])


@pytest.fixture
def opened(chromium: Any, page: Path) -> Iterator[Tab]:
    with tab(chromium) as opened:
        opened.open(page)
        yield opened
        assert opened.quiet(), (opened.requests, opened.errors)


def here(opened: Tab) -> int:
    """The token that the card is of."""
    (text,) = opened.texts(".token-card .at")
    return int(text.removeprefix("token ").split(",")[0].replace(",", ""))


def test_tab_reaches_everything_and_focus_can_be_seen(opened: Tab) -> None:
    reached, outlines = [], []
    for _ in range(60):
        opened.page.keyboard.press("Tab")
        reached.append(opened.page.evaluate("document.activeElement.tagName + '.' + document.activeElement.className"))
        outlines.append(opened.page.evaluate("getComputedStyle(document.activeElement).outlineStyle"))
        if reached[-1].startswith("PRE"):
            break
    for what in ("A.skip", "BUTTON.quiet", "svg", "SELECT", "INPUT", "BUTTON.row", "SPAN.tok"):
        assert any(name.lower().startswith(what.lower()) for name in reached), what
    assert all(outline != "none" for outline in outlines)
    assert sum(name.startswith("SPAN.tok") for name in reached) == 1  # one stop for all tokens
    assert sum(name.startswith("BUTTON.row") for name in reached) == 1  # and one for all responses


def test_arrow_keys_walk_through_tokens(opened: Tab) -> None:
    opened.page.locator(".row", has_text="60 tokens").first.click()
    opened.page.locator(".tok").first.focus()
    for key, place in [("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("ArrowDown", 11), ("ArrowUp", 1),
                       ("End", 59), ("ArrowRight", 59), ("Home", 0), ("ArrowLeft", 0)]:  # fmt: skip
        opened.page.keyboard.press(key)
        assert here(opened) == place, key
        assert opened.page.evaluate("document.activeElement.dataset.n") == str(place)


def test_arrow_keys_walk_through_responses(opened: Tab) -> None:
    rows = opened.page.locator(".row")
    rows.first.focus()
    opened.page.keyboard.press("ArrowDown")
    assert rows.nth(1).get_attribute("aria-selected") == "true"
    assert rows.nth(0).get_attribute("aria-selected") == "false"
    opened.page.keyboard.press("End")
    assert rows.last.get_attribute("aria-selected") == "true"
    assert opened.page.evaluate("document.activeElement.getAttribute('role')") == "option"


def test_arrow_keys_read_a_chart_and_enter_opens_the_step(opened: Tab) -> None:
    opened.page.locator("#curves svg.chart").first.focus()
    opened.page.keyboard.press("Home")
    assert "step 1" in opened.texts("#curves h3 .at")[0]
    opened.page.keyboard.press("ArrowRight")
    assert "step 2" in opened.texts("#curves h3 .at")[0]
    opened.page.keyboard.press("Enter")
    assert opened.page.get_by_label("Step", exact=True).input_value() == "2"


def test_arrow_keys_read_a_heat_map(opened: Tab) -> None:
    opened.page.locator("svg.heat-map").first.focus()
    opened.page.keyboard.press("ArrowLeft")
    assert "probability" in opened.texts(".readout")[0] and "token" in opened.texts(".readout")[0]


def test_everything_that_can_be_used_has_a_name(opened: Tab) -> None:
    nameless = opened.page.evaluate(
        """() => [...document.querySelectorAll('button, select, input, a, svg[role=img], [role=listbox]')]
        .filter((node) => !(node.getAttribute('aria-label') || node.textContent.trim() || node.labels?.length))
        .map((node) => node.outerHTML.slice(0, 80))"""
    )
    assert nameless == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(chromium: Any, page: Path, scheme: str) -> None:
    with tab(chromium, scheme=scheme) as opened:
        opened.open(page)
        for name in ("probability", "surprisal", "advantage", "reason", "gradient", "change"):
            opened.page.get_by_label("Colour by").select_option(name)
            for ink, paper in opened.page.evaluate(COLORS, ".pane .tok:not(.special)"):
                assert contrast(ink, paper) >= 4.5, (name, ink, paper)
        for selector in ("p", "h1", "h2", "h3", ".tile-name", ".row-more", ".badge", "td", "th", "nav a", ".verdict"):
            for ink, paper in opened.page.evaluate(COLORS, f"main {selector}, header {selector}"):
                assert contrast(ink, paper) >= 4.5, (selector, ink, paper)
        assert opened.quiet()


def test_the_theme_can_be_switched(opened: Tab) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    before, tokens = opened.page.evaluate(paper), opened.page.evaluate(COLORS, ".tok")
    opened.page.get_by_role("button", name="Switch to the dark theme").click()
    assert opened.page.evaluate(paper) != before
    assert opened.page.evaluate(COLORS, ".tok") != tokens
    opened.page.get_by_role("button", name="Switch to the light theme").click()
    assert opened.page.evaluate(paper) == before


@pytest.mark.parametrize("width", [360, 768])
def test_a_narrow_screen_is_never_scrolled_sideways(chromium: Any, page: Path, width: int) -> None:
    with tab(chromium, width=width, height=780) as opened:
        opened.open(page)
        opened.page.get_by_label("Compare with").select_option(index=1)
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
        sizes = opened.page.evaluate(
            "[...document.querySelectorAll('main text, main p, main td')]"
            ".map((node) => parseFloat(getComputedStyle(node).fontSize))"
        )
        assert min(sizes) >= 11
        opened.page.locator(".tok").nth(1).click()
        assert opened.page.locator(".token-card").is_visible()
        assert opened.quiet()


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("long") / "run", Made(steps=1, lengths=(LONG, 5, 12, 7)))
    return write_report([run])


def test_a_response_of_15000_tokens_is_laid_out_in_part_and_walked_through_in_whole(chromium: Any, long: Path) -> None:
    with tab(chromium) as opened:
        opened.open(long)
        opened.page.locator(".row", has_text="15,000 tokens").first.click()
        opened.page.wait_for_selector(".tok")
        assert 0 < opened.page.locator(".tok").count() < 3_000
        opened.page.locator(".tok").first.focus()
        opened.page.keyboard.press("End")
        assert opened.texts(".token-card .at")[0].startswith(f"token {LONG - 1:,}")
        last = opened.page.locator(".tok.here")
        assert last.inner_text() in "".join(PIECES) and last.is_visible()
        assert opened.page.locator(".tok").count() < 3_000
        for key in ("PageUp", "ArrowLeft", "Home"):
            opened.page.keyboard.press(key)
        assert opened.texts(".token-card .at")[0].startswith("token 0")
        assert opened.quiet()


VISIBLE_CHUNKS_ARE_FILLED = """() => {
    const pane = document.querySelector('.pane'), box = pane.getBoundingClientRect();
    return [...pane.children].every((chunk) => {
        const { top, bottom } = chunk.getBoundingClientRect();
        return bottom <= box.top || top >= box.bottom || chunk.childElementCount > 0;
    });
}"""


@pytest.mark.slow
def test_scrolling_a_long_response_shows_every_part_of_it(chromium: Any, long: Path) -> None:
    with tab(chromium) as opened:
        opened.open(long)
        opened.page.locator(".row", has_text="15,000 tokens").first.click()
        pane = opened.page.locator(".pane").first
        seen: set[int] = set()
        for share in range(0, 101, 2):
            pane.evaluate(f"node => {{ node.scrollTop = node.scrollHeight * {share / 100} }}")
            opened.page.wait_for_function(VISIBLE_CHUNKS_ARE_FILLED)
            seen |= set(pane.locator(".tok").evaluate_all("nodes => nodes.map(node => Number(node.dataset.n))"))
        assert len(seen) > 0.9 * LONG
        assert opened.quiet()


def test_several_runs_are_compared_with_seeds_as_a_band(chromium: Any, tmp_path: Path) -> None:
    other = '[objective]\nname = "grpo"\n[run]\nseed = 1\n'
    runs = [make_run(tmp_path / f"seed{n}", Made(steps=3)) for n in range(2)]
    runs.append(make_run(tmp_path / "other", Made(steps=3, config=other, objective={"name": "grpo"})))
    with tab(chromium) as opened:
        opened.open(write_report(runs, tmp_path / "all.html"))
        rows = opened.texts("#compare tbody tr")
        assert len(rows) == 2 and rows[0].startswith("stapo (tau_p=0.2)") and rows[1].startswith("grpo")
        card = opened.page.locator("#compare figure").first
        assert card.locator("path.line:not(svg svg path)").count() >= 2
        assert card.locator("path.spread").count() == 1  # of the two seeds; a single run has none
        assert opened.texts("#compare figure .legend")[0].startswith("stapo (tau_p=0.2) (2 runs)")
        assert opened.texts("h1") == ["3 runs"]
        assert opened.texts("h2")[:2] == ["Comparison", "seed0"]
        assert opened.texts("nav a")[:3] == ["Comparison", "Run", "Curves"]
        opened.page.locator("#summary select").select_option("2")
        opened.page.wait_for_selector("#microscope")
        assert opened.texts("h2")[1] == "other"
        assert opened.page.locator("#summary").bounding_box()["y"] == pytest.approx(0, abs=100)
        assert "grpo" in opened.texts(".panes h4")[0]
        assert opened.quiet()


def test_a_run_without_anything_still_gives_a_page(chromium: Any, tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    with tab(chromium) as opened:
        opened.open(write_report([tmp_path]))
        shown = " ".join(opened.texts("main"))
        for text in (
            "metrics.jsonl is missing",
            "There are no curves",
            "There are no responses",
            "No alarm was raised",
        ):
            assert text in shown
        assert opened.quiet()


def test_curves_can_be_seen_over_tokens_and_time(chromium: Any, tmp_path: Path) -> None:
    times = ("time/rollout", "time/update", "eval/accuracy/easy", "eval/accuracy/hard", "reward/accuracy/easy")
    older = {name: [""] * 4 for name in ("observations", "calls", "ended")}  # a record without what tools replied
    made = Made(steps=4, metrics=times, alarms=[{"step": 2, "alarm": "ratio"}], optional=("tool_tokens",), texts=older)
    runs = [make_run(tmp_path / "a", made), make_run(tmp_path / "b", Made(steps=3, metrics=times))]
    page = write_report(runs, tmp_path / "report.html")
    with tab(chromium) as opened:
        opened.open(page)
        choices = opened.page.locator("#curves .axis-choice select")
        assert opened.texts("#curves .axis-choice option") == ["steps", "response tokens", "time"]
        assert "Held-out accuracy by source" in " ".join(opened.texts("#curves h3"))
        assert {"easy", "hard"} <= set(opened.texts("#curves .legend .key span"))
        for axis, last, ticks in (
            ("tokens", "132 tokens, step 4", "100"),
            ("time", "8 s, step 4", "5 s"),
            ("step", "step 4", "3"),
        ):
            choices.select_option(axis)
            chart = opened.page.locator("#curves figure", has_text="Mean reward of").locator("svg.chart")
            chart.focus()
            opened.page.keyboard.press("End")
            assert opened.texts("#curves figure .at")[0] == last
            assert ticks in opened.texts("#curves figure:first-of-type text.tick.middle")
            assert opened.page.locator("#curves .alarm-mark").count() > 0
            opened.page.keyboard.press("Escape")
        opened.page.locator("#compare .axis-choice select").select_option("tokens")
        assert opened.page.locator("#compare svg.chart path.line").count() > 0
        # A click on a chart over tokens still opens the step that belongs to it.
        choices.select_option("tokens")
        opened.page.locator("#curves svg.chart").first.focus()
        opened.page.keyboard.press("End")
        opened.page.keyboard.press("Enter")
        assert opened.page.locator(".tool-gap", has_text="3 tokens of a tool's output, not recorded").count() > 0
        assert opened.quiet(), (opened.requests, opened.errors)
