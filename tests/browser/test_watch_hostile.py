"""The hostile texts of the report's tests in the page of `trimtab watch`, also in what comes while it is open.

30 of them in CI; `TRIMTAB_THOROUGH=1` takes all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.browser.browsing import Tab, expect, tab
from helpers.browser.hostile_texts import HOSTILE
from helpers.insight.report_runs import Made, make_run
from helpers.insight.watching import GrowingRun, step_line, watching
from helpers.thorough import THOROUGH
from trimtab.insight.report.embed import visible

AT_ONCE = 30
CHOSEN = HOSTILE if THOROUGH else HOSTILE[:: len(HOSTILE) // AT_ONCE][:AT_ONCE]
BATCHES = [CHOSEN[n : n + AT_ONCE] for n in range(0, len(CHOSEN), AT_ONCE)]


def make_hostile(folder: Path, texts: Sequence[str]) -> GrowingRun:
    """A run with these texts as tokens, prompts, answers, verdicts, configuration and name."""
    columns = ("prompt", "answer", "extracted", "source", "verdict")
    made = Made(
        lengths=(len(texts) + 1,) * len(texts), pieces=["<end>", *texts], texts={name: [*texts] for name in columns}
    )
    name = "".join(character for character in "".join(texts) if character not in "/\0").strip()
    run = GrowingRun(folder / name.encode()[:200].decode("utf-8", "ignore"), made)
    config = "".join(f"key{n} = {json.dumps(text)}\n" for n, text in enumerate(texts))
    (run.folder / "config.toml").write_text(config, encoding="utf-8", errors="surrogateescape")
    return run


def assert_untouched(opened: Tab) -> None:
    """Nothing was executed, nothing else was requested, and the page has only our elements."""
    assert opened.page.evaluate("typeof window.canary") == "undefined"
    assert opened.page.evaluate("({}).polluted === undefined")
    assert opened.requests == [] and opened.errors == []
    assert opened.page.locator("iframe, object, embed, base, form, link, math, audio, video, marquee").count() == 0
    assert opened.page.locator("body > script:not([type])").count() == 1
    bidi = {*"\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c"}
    assert not bidi & set(opened.page.locator("main").inner_text())


def flat(texts: Sequence[str]) -> str:
    return " ".join(" ".join(texts).split())


@pytest.mark.parametrize("batch", range(len(BATCHES)))
def test_hostile_texts_are_text_whenever_they_come(chromium: Any, tmp_path: Path, batch: int) -> None:
    texts = BATCHES[batch]
    run = make_hostile(tmp_path, texts)
    with watching(run.folder) as served, tab(chromium, server=served.root) as opened:
        page = opened.page
        page.goto(served.address)
        expect(page.locator("h1")).to_be_visible()
        # All of it comes after the page is open: metrics, alarms, responses.
        run.take(1, **dict.fromkeys(texts, 1.0))
        for text in texts:
            run.alarm(alarm=text, message=text, evidence={text: text}, suggestion=text, action=text)
        expect(page.locator(".alarm")).to_have_count(len(texts))
        expect(page.locator("table.responses tbody tr")).to_have_count(len(texts))
        expect(page.locator(".sample")).not_to_have_count(0)
        alarms, table = flat(opened.texts(".alarm")), flat(opened.texts("table.responses td"))
        metrics = flat(opened.texts(".any-metric option"))
        for text in texts:
            if text.strip():
                shown = " ".join(visible(text[:60]).split())[:50]
                assert shown in alarms and shown in metrics and shown in table, text[:80]
        page.get_by_role("button", name="Open the microscope").click()
        page.locator("#microscope .tok").first.click()
        for _ in texts:
            page.keyboard.press("ArrowRight")
        page.locator("#microscope .tok").nth(1).hover()
        page.get_by_role("button", name="Read the recorded tokens").click()
        expect(page.locator("#replay-effects")).to_be_visible()
        for name in ("Verdict", "Tool outcome"):
            page.locator(".response-table").get_by_label(name).select_option(index=0)
        page.locator(".response-table").get_by_role("searchbox").fill(texts[0][:200])
        picker = page.locator(".any-metric select")
        for n in range(min(picker.locator("option").count(), 12)):
            picker.select_option(index=n)
        assert_untouched(opened)
    run.close()


@pytest.mark.parametrize(
    "fragment", ["#run=0&step=<img src=x onerror=canary=1>", "#run=9&step=1", "#step=-1", "#javascript:canary=1"]
)
def test_an_address_of_somebody_else_runs_nothing(chromium: Any, tmp_path: Path, fragment: str) -> None:
    run = make_run(tmp_path / "run", Made(steps=1))
    with watching(run) as served, tab(chromium, server=served.root) as opened:
        opened.page.goto(served.address + fragment)
        expect(opened.page.locator(".status-head")).to_contain_text("step 1 of 8")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(step_line(2))
        expect(opened.page.locator(".status-head")).to_contain_text("step 2 of 8")
        assert_untouched(opened)
