"""Clicking through a report in a real browser: what it shows is what the records say."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.browser.browsing import Tab, expect, tab
from helpers.insight.report_runs import Made, make_run
from trimtab.insight.replay import recorded_objective
from trimtab.insight.report import write_report
from trimtab.insight.report.tokens import (
    StepTokenTable,
    TokenEffects,
    mini_batches,
    step_effects,
    token_table,
)
from trimtab.objectives import objective
from trimtab.objectives.plan import reason_words
from trimtab.record import open_run

ALARM = {
    "step": 3, "alarm": "entropy collapse", "message": "Entropy fell by half.", "evidence": {"entropy": 0.1},
    "suggestion": "lower update.lr", "action": "none",
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("pages") / "first-run", Made(steps=5, alarms=[ALARM]))


@pytest.fixture(scope="module")
def tables(run: Path) -> list[StepTokenTable]:
    records = open_run(run)
    mine = recorded_objective(dict(records.manifest.objective))
    return [token_table(records.step(step), mine) for step in records.steps]


@pytest.fixture(scope="module")
def report(run: Path) -> Path:
    return write_report([run])


@pytest.fixture
def opened(chromium: Any, report: Path) -> Iterator[Tab]:
    """The report in a tab of its own: filters, colours and the pointer's place are state that no test may inherit."""
    with tab(chromium) as opened:
        opened.open(report)
        yield opened
        assert opened.quiet(), (opened.requests, opened.errors)


def facts(opened: Tab) -> dict[str, list[str]]:
    """The card of the token that is looked at."""
    rows = opened.page.locator(".token-card .facts tbody tr")
    return {
        rows.nth(n).locator("th").inner_text(): rows.nth(n).locator("td").all_inner_texts() for n in range(rows.count())
    }


def reason(effects: TokenEffects, at: int) -> str:
    """The words for a token's reasons; a clip is one that the plan does not know."""
    code, clip = int(effects.reason[at]), ["clipped: the ratio is outside its range"] if effects.clipped[at] else []
    return "; ".join([*([reason_words(code)] if code or not clip else []), *clip])


def number(text: str) -> float:
    return float(text.replace("−", "-").replace(",", "").removesuffix(" nats"))


def test_the_summary_tells_the_results_in_sentences(opened: Tab) -> None:
    assert opened.texts("h1") == ["first-run"]
    (text,) = opened.texts(".summary-text")
    assert "Held-out accuracy rose from 25.0% to 50.0% of 200 problems (+25.0 points, 95 % interval" in text
    assert "One alarm was raised, the first at step 3: entropy collapse." in text
    assert any("50.0%" in tile and "from 25.0%" in tile for tile in opened.texts(".tile"))


def test_all_curves_are_drawn_with_axes_and_alarms(opened: Tab) -> None:
    titles = opened.texts("#curves h3")
    for title in (
        "Reward",
        "Accuracy",
        "Entropy",
        "Reweighted tokens",
        "Clipped tokens",
        "Gradient norm",
        "Response length",
    ):
        assert any(text.startswith(title) for text in titles), title
    charts = opened.page.locator("#curves svg.chart")
    for n in range(charts.count()):
        assert charts.nth(n).locator("path.line").first.get_attribute("d").startswith("M")
        assert charts.nth(n).locator("text.tick").count() >= 3
        assert charts.nth(n).locator(".alarm-mark").count() == 1


def test_the_entropy_has_quantiles_of_its_tokens(opened: Tab) -> None:
    card = opened.page.locator("#curves figure", has_text="Token-mean entropy")
    assert card.locator("path.fan").count() == 2 and card.locator("path.fan-middle").count() == 1


def test_any_metric_can_be_looked_at(opened: Tab) -> None:
    picker = opened.page.get_by_label("Any metric")
    assert {"tokens/count", "s2t/entropy_threshold"} <= set(picker.locator("option").all_inner_texts())
    picker.select_option("tokens/count")
    assert opened.texts(".any-metric h3")[0].startswith("tokens/count")
    assert opened.texts(".any-metric .value") == ["33"]


OBSERVED = """window.observed = new Set();
const { observe, unobserve } = ResizeObserver.prototype;
ResizeObserver.prototype.observe = function (node) { window.observed.add(node); observe.call(this, node); };
ResizeObserver.prototype.unobserve = function (node) { window.observed.delete(node); unobserve.call(this, node); };"""


def test_charts_that_were_replaced_are_no_longer_observed(chromium: Any, report: Path) -> None:
    with tab(chromium) as opened:
        opened.page.add_init_script(OBSERVED)
        opened.open(report)
        before = opened.page.evaluate("observed.size")
        for name in ("tokens/count", "reward/mean", "policy/entropy"):
            opened.page.get_by_label("Any metric").select_option(name)
        opened.page.locator(".token-set-slot select").select_option("silenced")
        assert opened.page.evaluate("observed.size") == before > 5
        assert opened.page.evaluate("[...observed].every((node) => node.isConnected)")


def test_pointing_at_one_chart_reads_all_of_them(opened: Tab) -> None:
    chart = opened.page.locator("#curves svg.chart").first
    box = chart.bounding_box()
    chart.hover(position={"x": box["width"] - 20, "y": 80})
    expect(opened.page.locator("#curves h3 .at").first).to_have_text("step 5")
    assert set(opened.texts("#curves h3 .at")) == {"step 5"}
    assert opened.texts("#curves .value")[0] == "0.833"
    opened.page.mouse.move(2, 2)
    expect(opened.page.locator("#curves h3 .at").first).to_have_text("")
    assert set(opened.texts("#curves h3 .at")) == {""}


def test_an_alarm_is_shown_in_full_and_leads_to_its_tokens(opened: Tab) -> None:
    (card,) = opened.texts(".alarm")
    for text in ("entropy collapse", "step 3", "Entropy fell by half.", "entropy 0.1", "lower update.lr"):
        assert text in card
    opened.page.get_by_role("button", name="Show this step's tokens").click()
    assert opened.page.get_by_label("Step", exact=True).input_value() == "3"
    assert {text.split()[1] for text in opened.texts(".row b")} == {"3"}


def test_the_heat_map_holds_all_tokens_and_marks_where_they_are_silenced(
    opened: Tab, tables: list[StepTokenTable]
) -> None:
    total = sum(len(step.logp) for step in tables)
    heat_map = opened.page.locator("svg.heat-map").first
    assert f"{total} tokens" in heat_map.get_attribute("aria-label")
    assert heat_map.locator("rect.region").count() == 1 and heat_map.locator("image").count() == 1
    opened.page.locator(".token-set-slot select").select_option("silenced")
    silenced = sum(int((step.effects.reason == 2).sum()) for step in tables)
    assert f"{silenced} tokens" in opened.page.locator("svg.heat-map").first.get_attribute("aria-label")


def test_other_objectives_stand_in_a_table(opened: Tab) -> None:
    rows = opened.page.locator("#replay-effects tbody tr")
    assert rows.first.locator("th").inner_text().startswith("recorded")
    assert rows.count() == 1 + opened.page.locator("#replay-overlaps tbody tr").count() > 3
    assert "%" in rows.first.inner_text()


def test_quadrants_add_up(opened: Tab) -> None:
    cells = opened.page.locator("#heat-maps .numbers tbody td:nth-child(2)").all_inner_texts()
    assert sum(float(cell.removesuffix("%")) for cell in cells) == pytest.approx(100, abs=2)


def test_a_tokens_numbers_are_those_of_the_record(opened: Tab, tables: list[StepTokenTable]) -> None:
    opened.page.locator(".row").first.click()
    row = opened.texts(".row")[0]
    step, response = int(row.split("step ")[1].split("response")[0]), int(row.split("response ")[1][0])
    table = tables[step - 1]
    first = table.step.offsets[response]
    for n in (0, 3):
        opened.page.locator(".tok").nth(n).click()
        shown, at = facts(opened), first + n
        assert number(shown["probability"][0]) == pytest.approx(math.exp(table.logp[at]), rel=0.01)
        assert number(shown["surprisal"][0]) == pytest.approx(-table.logp[at], rel=0.01)
        assert number(shown["entropy"][0]) == pytest.approx(table.entropy[at], rel=0.01)
        assert number(shown["advantage"][0]) == pytest.approx(table.effects.advantage[at], rel=0.01)
        assert number(shown["weight"][0]) == table.effects.weight[at]
        assert number(shown["gradient norm"][0]) == pytest.approx(table.grad_norm[at], rel=0.06, abs=1e-9)
        assert number(shown["predicted entropy change"][0]) == pytest.approx(
            table.entropy_change[at], rel=0.06, abs=1e-9
        )
        assert shown["reason"] == [reason(table.effects, at)]
        assert shown["clipped"][0].startswith("yes" if table.effects.clipped[at] else "no")


def test_tokens_are_coloured_by_what_the_reader_chooses(opened: Tab) -> None:
    def colors() -> list[str]:
        script = "nodes => nodes.map(node => node.style.background + ' ' + (node.dataset.mark || ''))"
        return list(opened.page.locator(".tok").evaluate_all(script))

    looks = {}
    for name in ("probability", "surprisal", "entropy", "advantage", "weight", "reason", "clip", "gradient", "change"):
        opened.page.get_by_label("Colour by").select_option(name)
        looks[name] = colors()
        assert opened.texts(".legend-title")
    assert len({tuple(look) for look in looks.values()}) >= 8
    marks = [look.split(" ")[-1] for look in looks["reason"]]
    off = opened.page.locator(".tok").evaluate_all("nodes => nodes.map(node => node.classList.contains('off'))")
    assert [mark == "S" for mark in marks] == off and any(off)  # a letter and a line through it, not colour alone


def test_colours_grow_with_the_value(opened: Tab) -> None:
    opened.page.get_by_label("Colour by").select_option("surprisal")
    script = "nodes => nodes.map(n => n.style.background.match(/\\d+/g).map(Number).reduce((a, b) => a + b))"
    lightness = opened.page.locator(".tok").evaluate_all(script)
    values = []
    for n in range(len(lightness)):
        opened.page.locator(".tok").nth(n).click()
        values.append(number(facts(opened)["surprisal"][0]))
    order = sorted(range(len(values)), key=values.__getitem__)
    assert [lightness[n] for n in order] == sorted(lightness, reverse=True)  # on white, more is darker


def test_silenced_tokens_of_a_step_are_found(opened: Tab, tables: list[StepTokenTable]) -> None:
    page = opened.page
    page.get_by_role("button", name="Silenced tokens").click()
    page.get_by_label("Step", exact=True).fill("4")
    page.get_by_label("Step", exact=True).press("Enter")
    expected = int((tables[3].effects.reason == 2).sum())
    assert page.locator(".row").count() == expected > 3
    assert opened.texts("[role=status]")[0].startswith(f"{expected} tokens")
    assert all("step 4" in row for row in opened.texts(".row"))
    page.locator(".row").nth(2).click()
    assert facts(opened)["reason"] == ["silenced: rare, confident and rewarded"]


def test_the_largest_gradients_are_found_in_order(opened: Tab, tables: list[StepTokenTable]) -> None:
    opened.page.get_by_role("button", name="100 largest gradients").click()
    heads = opened.page.locator(".row .row-head span:last-child").all_inner_texts()
    shown = [number(text.removeprefix("gradient ")) for text in heads]
    everything = sorted((float(v) for step in tables for v in step.grad_norm), reverse=True)
    assert len(shown) == 100
    assert shown == pytest.approx(everything[:100], rel=0.06)


def test_verdicts_filter_responses(opened: Tab) -> None:
    opened.page.get_by_label("Verdict").select_option("wrong")
    assert opened.page.locator(".row").count() > 0
    assert all("wrong" in row for row in opened.texts(".row"))


def test_for_a_step_that_is_not_there_the_nearest_are_named(opened: Tab) -> None:
    opened.page.get_by_label("Step", exact=True).fill("400")
    opened.page.get_by_label("Step", exact=True).press("Enter")
    (text,) = opened.texts("[role=status]")
    assert "Step 400 is not in this report" in text and "5" in text and "--step 400" in text


def test_another_objective_is_shown_beside_the_recorded_one(opened: Tab, tables: list[StepTokenTable]) -> None:
    page = opened.page
    page.get_by_label("Compare with").select_option(label="sspo")
    assert page.locator(".pane").count() == 2
    assert "sspo, planned over the same mini-batch" in opened.texts(".panes h4")
    row = opened.texts(".row")[0]
    step, response = int(row.split("step ")[1].split("response")[0]), int(row.split("response ")[1][0])
    table, other = tables[step - 1].step, objective("sspo")
    effects = step_effects(table, other, mini_batches(table, other.needs))
    at = table.offsets[response] + 2
    page.locator(".pane").nth(1).locator(".tok").nth(2).click()
    shown = facts(opened)
    assert len(shown["weight"]) == 2 and len(shown["probability"]) == 1
    assert shown["reason"][1] == reason(effects, at)
    assert shown["clip range of the ratio"][1] == f"1 − {effects.clip_low[at]:.3g} to 1 + {effects.clip_high[at]:.3g}"


def test_segments_can_be_marked(opened: Tab) -> None:
    cut = opened.page.locator(".tok.cut").first
    style = "node => getComputedStyle(node).borderLeftStyle"
    assert cut.evaluate(style) == "none"
    opened.page.get_by_label("mark segments").check()
    assert cut.evaluate(style) == "dotted"
    opened.page.get_by_label("mark segments").uncheck()
    assert cut.evaluate(style) == "none"


def test_pointing_at_a_token_shows_its_card(opened: Tab) -> None:
    opened.page.locator(".tok").nth(1).hover()
    tip = opened.page.locator("#tip")
    expect(tip).to_contain_text("probability")
    expect(tip).to_be_visible()
    opened.page.keyboard.press("Escape")
    expect(tip).to_be_hidden()


def test_the_configuration_is_there(opened: Tab) -> None:
    assert "tau_p = 0.2" in opened.texts("#configuration pre")[0]
