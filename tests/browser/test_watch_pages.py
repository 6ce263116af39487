"""The page of `trimtab watch` in a real browser: it grows with the run, without a reload."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.browser.browsing import Tab, expect, tab
from helpers.browser.contrast import COLORS, contrast
from helpers.insight.report_runs import Made, make_run
from helpers.insight.watching import GrowingRun, Watching, step_line, watching
from trimtab.files import locked
from trimtab.insight.watch.server import WatchServer


@contextmanager
def watched(chromium: Any, *runs: Path, fragment: str = "", **options: Any) -> Iterator[tuple[Tab, Watching]]:
    """Open the page of some runs; nothing but their server may be asked."""
    with watching(*runs) as served, tab(chromium, server=served.root, **options) as opened:
        opened.page.goto(served.address + fragment)
        opened.page.wait_for_selector("#status")
        opened.page.evaluate("window.sameDocument = true")
        yield opened, served
        assert opened.page.evaluate("window.sameDocument") is True  # it was never reloaded
        assert opened.quiet(), (opened.requests, opened.errors)


def curve_end(opened: Tab, title: str) -> Any:
    """The value in the legend of a chart: the last one, while nobody points at it."""
    return opened.page.locator("#curves figure", has_text=title).first.locator(".value").first


def test_a_run_is_watched_from_its_first_step_to_its_end(chromium: Any, tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "run", steps=6)
    with locked(run.folder):
        run.take()
        with watched(chromium, run.folder) as (opened, _):
            page = opened.page
            head, rows = page.locator(".status-head"), page.locator("table.responses tbody tr")
            expect(head).to_contain_text("Running: step 1 of 6, about 0:10 left")
            expect(rows).to_have_count(4)
            expect(curve_end(opened, "Token-mean entropy")).to_have_text("1")
            before = page.locator("#curves svg.chart path.line").first.get_attribute("d")

            run.take(2)
            expect(head).to_contain_text("Running: step 3 of 6")
            expect(curve_end(opened, "Token-mean entropy")).to_have_text("0.333")
            assert page.locator("#curves svg.chart path.line").first.get_attribute("d") != before
            expect(rows).to_have_count(12)
            expect(page.locator(".samples h3")).to_have_text("Step 3, the newest recorded")
            assert page.locator(".sample").count() == 4

            # A metric that was not there before has a card of its own, with its meaning.
            run.take(1, **{"eval/accuracy": 0.5})
            expect(page.locator("#curves figure", has_text="held-out").first).to_be_visible()
            page.get_by_label("Any metric").select_option("eval/accuracy")
            expect(page.locator(".any-metric .meaning")).to_contain_text("held-out problems answered correctly")

            expect(page.locator(".alarm")).to_have_count(0)
            run.alarm(alarm="entropy collapse", message="Entropy fell by half.", suggestion="lower `update.lr`")
            expect(page.locator(".alarm")).to_contain_text("lower update.lr")
            assert page.locator("#curves .alarm-mark").count() > 0

            # The reason of a token.
            expect(page.locator("#microscope .lead")).to_contain_text("4 steps recorded")  # written by another thread
            page.get_by_role("button", name="Open the microscope").click()
            page.locator("#microscope .tok").first.click()
            expect(page.locator(".token-card")).to_contain_text("silenced: rare, confident and rewarded")

            run.take(2)
            (run.folder / "model").mkdir()
            expect(head).to_contain_text("Running: step 6 of 6")
            expect(page.locator("#microscope .tok").first).to_be_visible()  # what is read stays
            assert "step 4" in page.locator(".row").first.inner_text()
    # The lock is free: the run has ended. A page that is open learns of it, and one that is opened later too.
    with watched(chromium, run.folder) as (opened, served):
        expect(opened.page.locator(".status-head")).to_contain_text("Finished: step 6 of 6")
        served.stop()
        expect(opened.page.locator(".connection")).to_contain_text("The server of this page has ended.")
    run.close()


def test_a_page_learns_that_its_run_has_ended(chromium: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made(steps=8))
    (run / "model").mkdir()
    with locked(run) as _:
        opening = watched(chromium, run)
        opened, _served = opening.__enter__()
        expect(opened.page.locator(".status-head")).to_contain_text("Running: step 8 of 8")
        assert "●" in opened.page.title()
    expect(opened.page.locator(".status-head")).to_contain_text("Finished: step 8 of 8")
    assert "●" not in opened.page.title()
    opening.__exit__(None, None, None)


def test_a_killed_run_says_so_and_goes_on_when_it_is_resumed(chromium: Any, tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "run", steps=9)
    with locked(run.folder):
        run.take(5)
    run.add(step_line(6)[:25])  # half a line
    with watched(chromium, run.folder) as (opened, _):
        head = opened.page.locator(".status-head")
        expect(head).to_contain_text("Ended without saving its last step: step 5 of 9")
        expect(opened.page.locator(".status-words")).to_contain_text(f"trimtab train --resume {run.folder}")
        with locked(run.folder):
            # As a resume from step 3 writes it: whole, shorter, another file.
            (run.folder / "new").write_text("".join(step_line(step) for step in range(1, 4)))
            (run.folder / "new").replace(run.folder / "metrics.jsonl")
            expect(head).to_contain_text("Running: step 3 of 9")
            expect(curve_end(opened, "Token-mean entropy")).to_have_text("0.333")
            run.add(step_line(4, **{"policy/entropy": 0.75}))
            expect(head).to_contain_text("Running: step 4 of 9")
            expect(curve_end(opened, "Token-mean entropy")).to_have_text("0.75")
    run.close()


def test_two_runs_are_compared_while_they_grow(chromium: Any, tmp_path: Path) -> None:
    first = GrowingRun(tmp_path / "first")
    second = GrowingRun(tmp_path / "second", Made(objective={"name": "grpo"}))
    (second.folder / "config.toml").write_text('[objective]\nname = "grpo"\n[run]\nsteps = 8\n')
    first.take(3)
    second.take(2)
    with watched(chromium, first.folder, second.folder) as (opened, _):
        page = opened.page
        assert opened.texts("h1") == ["2 runs"]
        legend = page.locator("#compare figure", has_text="Mean reward").or_(page.locator("#compare figure")).first
        expect(legend.locator(".value").nth(1)).to_have_text("0.333")
        second.take(4)
        expect(legend.locator(".value").nth(1)).to_have_text("0.6")
        expect(page.locator(".other-run")).to_contain_text("second")
        page.locator("#summary select").first.select_option("1")
        expect(page.locator("#summary h2")).to_have_text("second")
        expect(page.locator("#status")).to_contain_text("first")
        expect(page.locator("table.responses tbody tr")).to_have_count(24)
        second.take(1)
        expect(page.locator("table.responses tbody tr")).to_have_count(28)
    first.close()
    second.close()


def test_a_part_of_a_run_is_looked_at(chromium: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(step_line(step) for step in range(1, 6_001)))
    with watched(chromium, run) as (opened, _):
        chart = opened.page.locator("#curves svg.chart").first
        chart.scroll_into_view_if_needed()
        box = chart.bounding_box()
        opened.page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 90)
        opened.page.mouse.down()
        opened.page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 90, steps=4)
        opened.page.mouse.up()
        expect(opened.page.locator("#curves .range")).to_contain_text("Whole run")
        first, last = (
            int(text.replace(",", ""))
            for text in opened.texts("#curves .range span")[0].removeprefix("steps ").split(" to ")
        )
        assert 2_500 < first < last < 4_200
        chart = opened.page.locator("#curves svg.chart").first
        chart.focus()
        for key, step in (("Home", first), ("ArrowRight", first + 1), ("ArrowRight", first + 2)):
            opened.page.keyboard.press(key)  # every step is there
            assert opened.texts("#curves h3 .at")[0] == f"step {step:,}"
        opened.page.keyboard.press("+")
        expect(opened.page.locator("#curves .range span")).not_to_contain_text(f"{first:,} to {last:,}")
        opened.page.get_by_role("button", name="Whole run").click()
        expect(opened.page.locator("#curves .range")).to_have_text("")


def test_the_table_is_filtered_sorted_and_exported(chromium: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made(steps=5))
    with watched(chromium, run) as (opened, _):
        page = opened.page
        rows = page.locator("table.responses tbody tr")
        expect(rows).to_have_count(20)
        table = page.locator(".response-table")
        table.get_by_label("Verdict").select_option("wrong")
        expect(page.locator("table.responses tbody .verdict", has_text="correct")).to_have_count(0)
        table.get_by_label("Verdict").select_option("")
        table.get_by_label("From step").fill("4")
        expect(rows).to_have_count(8)
        table.get_by_label("to tokens").fill("7")
        expect(rows).to_have_count(4)
        with page.expect_download() as download:
            page.get_by_role("button", name="Export as JSON lines").click()
        lines = [json.loads(line) for line in Path(download.value.path()).read_text().splitlines()]
        assert sorted((line["step"], line["length"]) for line in lines) == [(4, 5), (4, 7), (5, 5), (5, 7)]
        table.get_by_label("From step").fill("")
        table.get_by_label("to tokens").fill("")
        table.get_by_label("Text").fill("nowhere")
        expect(rows).to_have_count(0)
        table.get_by_label("Text").fill("")
        table.get_by_label("Sort by").select_option("longest")
        expect(rows.first).to_contain_text("12")
        # A row leads to its tokens, and a token has an address.
        rows.first.locator("a").click()
        expect(page.locator("#microscope .row[aria-selected=true]")).to_contain_text("response 2")
        page.locator("#microscope .tok").nth(3).click()
        link = page.get_by_role("link", name="Link to this token").get_attribute("href")
        assert link == "#run=0&step=5&response=2&token=3" or link.endswith("&response=2&token=3")


def test_a_link_opens_its_token(chromium: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made(steps=5))
    with watched(chromium, run, fragment="#run=0&step=3&response=2&token=7") as (opened, _):
        expect(opened.page.locator(".token-card .at")).to_have_text("token 7")
        expect(opened.page.locator("#microscope .row[aria-selected=true]")).to_contain_text("step 3response 2")
        opened.page.evaluate("location.hash = '#run=0&step=2&response=0&token=1'")
        expect(opened.page.locator(".token-card .at")).to_have_text("token 1")
        expect(opened.page.locator("#microscope .row[aria-selected=true]")).to_contain_text("step 2response 0")


def test_any_recorded_step_is_loaded_when_it_is_opened(chromium: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made(steps=5, alarms=[{"step": 2, "alarm": "made", "message": "made"}]))
    with watched(chromium, run) as (opened, _):
        page = opened.page
        page.get_by_role("button", name="Show this step's tokens").click()
        expect(page.locator("#microscope .row").first).to_contain_text("step 2")
        step = page.locator("#microscope").get_by_label("Step", exact=True)
        step.fill("4")
        step.press("Enter")
        expect(page.locator("#microscope .row").first).to_contain_text("step 4")
        page.get_by_label("Compare with").select_option(label="sspo")
        expect(page.locator(".pane")).to_have_count(2)
        page.get_by_role("button", name="Silenced tokens").click()
        expect(page.locator("#microscope .row").first).to_contain_text("step 4")
        page.get_by_role("button", name="Read the recorded tokens").click()
        expect(page.locator("svg.heat-map").first).to_be_visible()
        expect(page.locator("#replay-effects tbody tr").first).to_contain_text("recorded")


def test_a_stream_that_breaks_is_opened_again(chromium: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = GrowingRun(tmp_path / "run")
    run.take(3)

    async def broken(self: WatchServer, known: Any) -> AsyncIterator[str]:
        raise ConnectionResetError
        yield ""

    with monkeypatch.context() as broken_once, watching(run.folder) as served:
        broken_once.setattr(WatchServer, "_stream", broken)
        with tab(chromium, server=served.root) as opened:
            opened.page.goto(served.address)
            expect(opened.page.locator(".connection")).to_contain_text("The server does not answer.")
            run.take()
            broken_once.undo()
            expect(opened.page.locator(".connection")).to_have_count(0)
            expect(opened.page.locator(".status-head")).to_contain_text("step 4 of 8")
    run.close()


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (768, "dark")])
def test_a_narrow_screen_is_never_scrolled_sideways_and_can_be_read(
    chromium: Any, tmp_path: Path, width: int, scheme: str
) -> None:
    run = make_run(tmp_path / "run", Made(steps=3, alarms=[{"step": 2, "alarm": "made", "message": "made"}]))
    with watched(chromium, run, width=width, scheme=scheme) as (opened, _):
        expect(opened.page.locator("table.responses tbody tr")).to_have_count(12)
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
        for selector in ("p", "h1", "h2", "h3", "td", "th", "dt", "dd", ".verdict", "button"):
            for ink, paper in opened.page.evaluate(COLORS, f"main {selector}"):
                assert contrast(ink, paper) >= 4.5, (selector, ink, paper)
