"""Hostile texts in every place of a run: none is executed, none breaks the page, all are shown as text.

30 of them in CI; `TRIMTAB_THOROUGH=1` takes all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.browser.browsing import Tab, tab
from helpers.browser.hostile_texts import HOSTILE
from helpers.insight.report_runs import Made, make_run
from helpers.thorough import THOROUGH
from trimtab.insight.report import write_report
from trimtab.insight.report.embed import visible

AT_ONCE = 30  # texts of one report
CHOSEN = HOSTILE if THOROUGH else HOSTILE[:: len(HOSTILE) // AT_ONCE][:AT_ONCE]
BATCHES = [CHOSEN[n : n + AT_ONCE] for n in range(0, len(CHOSEN), AT_ONCE)]


def make_hostile(folder: Path, texts: Sequence[str]) -> Path:
    """Make a run with these texts as tokens, prompts, answers, verdicts, metrics, alarms, configuration and name."""
    places = len(texts)
    config = "".join(f"key{n} = {json.dumps(text)}\n" for n, text in enumerate(texts))
    alarms = [
        {"step": 1, "alarm": text, "message": text, "evidence": {text: text}, "suggestion": text} for text in texts
    ]
    columns = ("prompt", "answer", "extracted", "source", "verdict")
    made = Made(
        steps=1,
        lengths=(places + 1,) * places,
        pieces=["<end>", *texts],
        config=config,
        texts={name: [*texts] for name in columns},
        metrics=texts,
        alarms=alarms,
    )
    name = "".join(character for character in "".join(texts) if character not in "/\0").strip()
    return make_run(folder / name.encode()[:200].decode("utf-8", "ignore"), made)


@pytest.fixture(scope="module", params=range(len(BATCHES)))
def hostile_report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    texts = BATCHES[request.param]
    run = make_hostile(tmp_path_factory.mktemp("hostile"), texts)
    return write_report([run], run.parent / "report.html", steps=[1]), texts, run


@pytest.fixture
def hostile(chromium: Any, hostile_report: Any) -> Iterator[Any]:
    report, texts, run = hostile_report
    with tab(chromium) as opened:
        opened.open(report)
        yield opened, texts, run


def shown(text: str) -> str:
    """Return the beginning of a text as the page shows it; long ones are truncated there."""
    return " ".join(visible(text[:150]).split())


def text_of(opened: Tab, selector: str) -> str:
    return " ".join(" ".join(opened.texts(selector)).replace("⏎", " ").replace("⇥", " ").split())


def assert_untouched(opened: Tab) -> None:
    """Nothing was executed, nothing was requested, and the page has only our elements."""
    assert opened.page.evaluate("typeof window.canary") == "undefined"
    assert opened.page.evaluate("({}).polluted === undefined")
    assert opened.requests == [] and opened.errors == []
    assert opened.page.locator("iframe, object, embed, base, form, link, math, audio, video, marquee").count() == 0
    assert opened.page.locator("body > script:not([type])").count() == 1
    assert opened.page.locator("footer").is_visible()


def test_hostile_texts_are_shown_as_text_everywhere(hostile: Any) -> None:
    opened, texts, run = hostile
    name = text_of(opened, "h1")
    assert " ".join(visible(run.name).split()) == name
    config, alarms = text_of(opened, "#configuration pre"), text_of(opened, ".alarm")
    metrics = " ".join(" ".join(opened.texts(".any-metric option")).split())
    for text in texts:
        if text.strip():
            assert shown(text)[:100] in alarms, text[:80]
            assert shown(text)[:100] in metrics, text[:80]
            assert json.dumps(text)[1:60].split("\\")[0].strip() in config, text[:80]
    assert_untouched(opened)


def test_hostile_tokens_and_prompts_are_shown_as_text(hostile: Any) -> None:
    opened, texts, _ = hostile
    tokens = text_of(opened, ".pane .tok")
    for text in texts:
        if text.strip():
            assert shown(text)[:100] in tokens, text[:80]
    seen = set()
    rows = opened.page.locator(".row")
    for n in range(rows.count()):
        rows.nth(n).click()
        seen.add(text_of(opened, ".prompt pre")[:60])
    for text in texts:
        assert shown(text)[:60].strip() in seen, text[:80]
    assert_untouched(opened)


def test_walking_over_hostile_tokens_runs_nothing(hostile: Any) -> None:
    opened, texts, _ = hostile
    opened.page.locator(".row").first.click()
    opened.page.locator(".tok").first.focus()
    for _ in texts:
        opened.page.keyboard.press("ArrowRight")
    opened.page.locator(".tok").nth(1).hover()
    for name in ("Silenced tokens", "100 largest gradients", "Clipped tokens", "All responses"):
        opened.page.get_by_role("button", name=name).click()
    opened.page.get_by_label("Compare with").select_option(index=1)
    opened.page.get_by_label("Compare with").select_option("")
    picker = opened.page.locator(".any-metric select")
    for n in range(min(picker.locator("option").count(), 12)):
        picker.select_option(index=n)
    assert_untouched(opened)


def test_right_to_left_text_does_not_reorder_the_page(hostile: Any) -> None:
    opened, _, _ = hostile
    raw = opened.page.locator("main").inner_text()
    assert not {*"\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c"} & set(raw)
    assert opened.page.locator(".tok").first.evaluate("node => getComputedStyle(node).unicodeBidi") == "isolate"
    assert opened.page.title().endswith("· trimtab report")


def test_lone_surrogates_are_replaced_and_shown(chromium: Any, tmp_path: Path) -> None:
    halves = ["\ud800 high", "low \udfff", "\udc00\ud800 swapped"]
    run = make_run(tmp_path / "run", Made(steps=1, pieces=["<end>", *halves], metrics=halves))
    (run / "alarms.jsonl").write_text(json.dumps({"step": 1, "alarm": halves[0], "message": halves[1]}))
    with tab(chromium) as opened:
        opened.open(write_report([run]))
        assert "\ufffd high" in text_of(opened, ".alarm h3")
        assert "low \ufffd" in text_of(opened, ".alarm p")
        assert {"\ufffd high", "low \ufffd", "\ufffd\ufffd swapped"} <= set(opened.texts(".any-metric option"))
        assert "high" in text_of(opened, ".tok") and "\ufffd" in text_of(opened, ".tok")
        assert_untouched(opened)
