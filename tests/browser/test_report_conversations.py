"""Conversations in the microscope: messages, calls and replies in order, folds, and hostile texts from tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from helpers.browser.browsing import expect, tab
from helpers.browser.hostile_texts import HOSTILE
from helpers.insight.report_runs import Made, make_run
from trimtab.insight.report import write_report
from trimtab.insight.report.embed import visible

Call = tuple[int, str, str, str, float]
METRICS = ("conversation/called_share", "tools/calls", "tools/ok", "tools/timeout", "time/tools_wait_share")
LONG = "\n".join(f"line {n}" for n in range(200))


def observed(*replies: tuple[int, int, str]) -> str:
    return json.dumps([{"after": after, "tokens": tokens, "text": text} for after, tokens, text in replies])


def called(*calls: Call) -> str:
    names = ("turn", "tool", "arguments", "outcome", "seconds")
    return json.dumps([dict(zip(names, call, strict=True)) for call in calls])


def conversations(folder: Path, observations: Sequence[str], calls: Sequence[str], length: int = 9) -> Path:
    texts = {"observations": observations, "calls": calls, "ended": ["answer"] * len(calls)}
    lengths = [length] * len(calls)
    made = Made(steps=1, lengths=lengths, texts=texts, metrics=METRICS, optional=("current_logp",))
    return write_report([make_run(folder / "run", made)], steps=[1])


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_a_conversation_is_shown_in_its_order(chromium: Any, tmp_path: Path, width: int, scheme: str) -> None:
    calls = called((0, "calculator", '{"expression": "2*21"}', "ok", 0.25), (1, "python", "{}", "timeout", 10.0))
    report = conversations(tmp_path, [observed((3, 7, "42\n"), (6, 900, LONG)), ""], [calls, ""])
    with tab(chromium, width=width, scheme=scheme) as opened:
        opened.open(report)
        opened.page.locator(".row", has_text="2 calls").click()
        kinds = opened.page.locator(".chunk > *").evaluate_all("nodes => nodes.map((node) => node.classList[0])")
        order = [kind for kind, _ in groupby(kinds)]
        assert order == ["turn-head", "tok", "observed", "turn-head", "tok", "observed", "turn-head", "tok"]
        assert opened.texts(".turn-head") == [f"model, message {n}" for n in (1, 2, 3)]
        assert opened.texts(".call-head .outcome") == ["✓ ok", "✗ timeout"]
        assert opened.texts(".observed pre")[0] == "expression: 2*21"
        assert "250 ms" in opened.texts(".call-head")[0]
        assert len(opened.texts(".untrained")) == 2
        assert "3 messages, 2 calls (1 failed). Ended by answer" in " ".join(opened.texts(".prompt"))
        # A long reply is folded; nothing is wider than the window.
        assert opened.page.locator(".observed details").evaluate_all("nodes => nodes.map((node) => node.open)") == [
            True,
            True,
            False,
        ]
        assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        # One without turns is shown as before.
        opened.page.locator(".row").nth(1).click()
        assert opened.page.locator(".observed, .turn-head").count() == 0
        assert opened.quiet(), (opened.requests, opened.errors)


def test_tokens_are_reached_by_keys_across_turns_and_folds_are_alike_in_both_panes(
    chromium: Any, tmp_path: Path
) -> None:
    report = conversations(tmp_path, [observed((3, 7, "42\n"), (6, 900, LONG))], [""], length=600)
    with tab(chromium) as opened:
        opened.open(report)
        opened.page.locator(".tok").first.focus()
        for n in range(1, 8):
            opened.page.keyboard.press("ArrowRight")
            expect(opened.page.locator(".pane .tok.here")).to_have_attribute("data-n", str(n))
        opened.page.get_by_label("Compare with").select_option(index=1)
        folds = opened.page.locator("details[data-fold='2/reply']")
        expect(folds).to_have_count(2)
        folds.first.locator("summary").click()
        expect(folds.nth(1)).to_have_attribute("open", "")
        # What is open stays so when the response is drawn again.
        opened.page.get_by_label("Colour by").select_option("reason")
        expect(folds.nth(1)).to_have_attribute("open", "")
        # Far away the chunk with the turns is dropped, and it comes back as it was.
        opened.page.locator(".tok.here").first.focus()
        opened.page.keyboard.press("End")
        expect(opened.page.locator(".pane").first.locator(".tok.here")).to_have_attribute("data-n", "599")
        opened.page.keyboard.press("Home")
        expect(opened.page.locator(".pane").first.locator(".tok.here")).to_have_attribute("data-n", "0")
        expect(folds.first).to_have_attribute("open", "")
        assert opened.quiet(), (opened.requests, opened.errors)


def test_curves_of_tools_are_there_where_a_run_has_them(chromium: Any, tmp_path: Path) -> None:
    cards = {"Conversations", "Calls of tools", "Failed calls", "Waiting for tools"}
    report = conversations(tmp_path, [""], [called((0, "python", "{}", "ok", 1.0))])
    plain = write_report([make_run(tmp_path / "plain", Made(steps=1))])
    with tab(chromium) as opened:
        opened.open(report)
        assert cards <= {title.split("\n")[0] for title in opened.texts("#curves h3")}
        opened.open(plain)
        assert not cards & {title.split("\n")[0] for title in opened.texts("#curves h3")}


def test_hostile_replies_and_calls_are_shown_as_text(chromium: Any, tmp_path: Path) -> None:
    texts = [text for text in HOSTILE[:: len(HOSTILE) // 30] if text.strip()]
    arguments = [json.dumps({"code": text, text: 1}) for text in texts]
    calls = [called((0, text, given, text, 0.1)) for text, given in zip(texts, arguments, strict=True)]
    report = conversations(tmp_path, [observed((3, 5, text)) for text in texts], calls)
    with tab(chromium) as opened:
        opened.open(report)
        seen = ""
        rows = opened.page.locator(".row")
        for n in range(rows.count()):
            rows.nth(n).click()
            seen += " ".join(" ".join(opened.texts(".observed")).split()) + "\n"
        for text in texts:
            assert " ".join(visible(text[:80]).split()) in seen, text[:80]
        assert opened.page.evaluate("typeof window.canary") == "undefined"
        assert opened.page.evaluate("({}).polluted === undefined")
        assert opened.page.locator("iframe, object, embed, base, form, link, math, audio, video, marquee").count() == 0
        assert opened.quiet(), (opened.requests, opened.errors)
