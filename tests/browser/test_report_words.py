"""What the page says beside its numbers: reasons, advice, code, bands and regions, whole words on a phone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.browser.browsing import tab
from helpers.insight.report_runs import Made, make_run
from helpers.stress.made_stress import made_stress
from trimtab.insight.report import write_report

# Words of more than one line, but for those in a column of code.
BROKEN = """() => {
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (node.parentElement.closest("pre, script, style, .pane, svg, .tip, .context, option, td")) continue;
    for (const word of node.data.matchAll(/[\\p{L}\\p{N}]+/gu)) {
      const range = document.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const boxes = [...range.getClientRects()].filter((box) => box.width > 0);
      const tops = new Set(boxes.map((box) => Math.round(box.top)));
      if (tops.size > 1) found.push(`${word[0]} in ${node.parentElement.closest("section")?.id}`);
    }
  }
  return found;
}"""
ALARM = {
    "step": 3,
    "alarm": "clip",
    "message": "m",
    "suggestion": "Try a lower update.lr; `trimtab stress` finds how far",
}


def with_metrics(folder: Path, *lines: dict[str, float], made: Made | None = None) -> Path:
    """A run with these metrics."""
    run = make_run(folder, made or Made(steps=3))
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_a_clipped_token_is_not_said_to_be_kept_unchanged(chromium: Any, tmp_path: Path) -> None:
    with tab(chromium) as opened:
        opened.open(write_report([make_run(tmp_path / "run", Made(steps=5, lengths=(40, 30, 30, 30)))]))
        opened.page.locator("#microscope").scroll_into_view_if_needed()
        seen = set()
        for row in range(opened.page.locator(".row").count()):
            opened.page.locator(".row").nth(row).click()
            for n in range(opened.page.locator(".tok").count()):
                opened.page.locator(".tok").nth(n).click()
                shown = opened.page.locator(".token-card .facts").inner_text()
                clipped = "yes: no gradient" in shown
                seen.add(clipped)
                assert ("clipped: the ratio is outside its range" in shown) == clipped
                assert not (clipped and "kept unchanged" in shown)
            if True in seen:
                break
        assert seen == {False, True}


def test_advice_begins_once_and_code_is_set_as_code(chromium: Any, tmp_path: Path) -> None:
    with tab(chromium) as opened:
        opened.open(write_report([make_run(tmp_path / "run", Made(steps=5, alarms=[ALARM]))]))
        (card,) = opened.texts(".alarm")
        assert "Advice: Try a lower update.lr; trimtab stress finds how far" in card
        assert opened.texts(".alarm code") == ["trimtab stress"]
        names = opened.page.locator(".any-metric option").all_text_contents()
        for name in names:
            opened.page.locator(".any-metric select").select_option(name)
            assert "`" not in opened.texts(".any-metric .meaning")[0]


def test_a_metric_whose_words_have_code_shows_it_as_code(chromium: Any, tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run", Made(steps=3, metrics=["tokens/spurious_share", "reward/void_share", "eval/problems"])
    )
    with tab(chromium) as opened:
        opened.open(write_report([run, make_run(tmp_path / "other", Made(steps=3))], tmp_path / "both.html"))
        assert "`" not in " ".join(opened.texts("main .meaning"))


def test_bands_of_shares_stay_between_0_and_1(chromium: Any, tmp_path: Path) -> None:
    values = [
        {"reward/accuracy": 0.5, "update/clip_share": 0.0, "policy/entropy": 0.0},
        {"reward/accuracy": 1.0, "update/clip_share": 0.4, "policy/entropy": 0.4},
    ]
    runs = [
        with_metrics(tmp_path / str(seed), *({"step": n, **each} for n in (1, 2, 3)))
        for seed, each in enumerate(values)
    ]
    with tab(chromium) as opened:
        opened.open(write_report(runs, tmp_path / "all.html"))
        for chart in opened.page.locator("#compare figure").all():
            ticks = [text for text in chart.locator("text.tick.end").all_text_contents() if text.endswith("%")]
            values = [float(text.replace("−", "-").removesuffix("%")) for text in ticks]
            assert all(0 <= value <= 100 for value in values), chart.inner_text()
            top, bottom = chart.locator("path.spread").evaluate(
                "(node) => [node.getBBox().y, node.getBBox().y + node.getBBox().height]"
            )
            lines = chart.evaluate(
                "(node) => [...node.querySelectorAll('.gridline')].map((line) => Number(line.getAttribute('y1')))"
            )
            if values:
                assert bottom <= max(lines) + 0.5 or min(values) > 0
                assert top >= min(lines) - 0.5 or max(values) < 100


@pytest.mark.parametrize(("threshold", "regions"), [({"s2t/entropy_threshold": 1.2}, 1), ({}, 0)])
def test_without_a_threshold_there_is_no_region_and_a_sentence_says_so(
    chromium: Any, tmp_path: Path, threshold: dict[str, float], regions: int
) -> None:
    run = with_metrics(tmp_path / "run", *({"step": n, "reward/mean": 0.5, **threshold} for n in (1, 2, 3)))
    with tab(chromium) as opened:
        opened.open(write_report([run]))
        assert opened.page.locator("rect.region").count() == regions
        meaning = opened.texts("#heat-maps .meaning")[0]
        assert ("No threshold of the entropy is known" in meaning) == (regions == 0)


@pytest.mark.parametrize("width", [360, 420])
def test_words_are_whole_on_a_phone(chromium: Any, tmp_path: Path, width: int) -> None:
    runs = [make_run(tmp_path / f"run-{n}", Made(steps=3, config=f"[objective]\nname='stapo'\n[run]\nseed={n}\n"))
            for n in range(2)]  # fmt: skip
    pages = [write_report(runs[:1]), write_report(runs, tmp_path / "both.html")]
    pages.append(
        write_report([made_stress(tmp_path / "stress", {"1": ("110", "111"), "2": ("000", "111")}, ("a", "b"))])
    )
    for page in pages:
        with tab(chromium, width=width, height=780) as opened:
            opened.open(page)
            for closed in opened.page.locator("details:not([open]) > summary").all():
                closed.click()
            assert opened.page.evaluate(BROKEN) == []
            assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
