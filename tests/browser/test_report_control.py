"""The panel of entropy control in a browser: charts and words, and none of it where nothing is controlled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers.browser.browsing import tab
from helpers.insight.report_runs import Made, make_run, trim_metrics
from trimtab.insight.report import write_report

TRIM = "dapo + trim(floor=0.3)"


def trim_run(folder: Path) -> Path:
    made = Made(steps=2, objective={"name": TRIM}, entropy=0.3, config=f'[objective]\nname = "{TRIM}"\n')
    run = make_run(folder, made)
    (run / "metrics.jsonl").write_text(trim_metrics(60))
    return run


def test_a_run_of_trim_has_charts_of_band_prediction_weight_and_drive(chromium: Any, tmp_path: Path) -> None:
    with tab(chromium) as opened:
        opened.open(write_report([trim_run(tmp_path / "run")]))
        titles = [title.split("\n")[0] for title in opened.texts("#control h3")]
        assert titles[:2] == ["Entropy and its target", "Prediction and outcome"]
        assert titles[2:] == ["Weight", "Drive", "R² of the prediction"]
        assert "The entropy was held" in opened.texts("#control .lead")[0]
        assert "R² 0." in opened.texts("#control .meaning")[1] and "gain" in opened.texts("#control .meaning")[1]
        assert "shaded: counts as held" in opened.texts("#control .aside")
        assert opened.page.locator("#control .fan").count() == 1
        assert opened.page.locator("#control path.line").count() >= 8
        assert "Entropy control" in opened.texts("nav a")
        assert opened.quiet(), (opened.requests, opened.errors)


def test_a_run_of_stare_shows_its_critical_weight(chromium: Any, tmp_path: Path) -> None:
    with tab(chromium) as opened:
        opened.open(write_report([make_run(tmp_path / "run", Made(steps=3, objective={"name": "stare"}, entropy=0.1))]))
        assert [title.split("\n")[0] for title in opened.texts("#control h3")] == ["Critical weight"]
        assert {"critical", "in use"} <= set(opened.texts("#control .key span"))
        assert opened.quiet(), (opened.requests, opened.errors)


def test_other_runs_have_no_such_panel_and_compared_runs_have_its_curves(chromium: Any, tmp_path: Path) -> None:
    plain = make_run(tmp_path / "plain", Made(steps=2))
    with tab(chromium) as opened:
        opened.open(write_report([plain]))
        assert opened.page.locator("#control").count() == 0
        opened.open(write_report([plain, trim_run(tmp_path / "trim")], tmp_path / "both.html"))
        assert {"Weight: trim", "Drive: leverage"} <= {title.split("\n")[0] for title in opened.texts("#compare h3")}
        assert opened.quiet(), (opened.requests, opened.errors)
