"""Several rewards in a report: curves of each by name, and each beside a response's reward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers.browser.browsing import tab
from helpers.insight.report_runs import Made, data_of, make_run, response_of
from trimtab.insight.report import write_report

METRICS = ("rewards/task", "rewards/task_spread", "rewards/format", "rewards/format_spread", "reward/score")


def test_each_reward_has_its_curve_and_is_shown_with_the_response(chromium: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made(metrics=METRICS, optional=("current_logp",)))
    report = write_report([run])
    with tab(chromium) as opened:
        opened.open(report)
        titles = opened.texts("#curves h3")
        assert {"Rewards", "What each reward teaches", "Score"} <= {title.split("\n")[0] for title in titles}
        assert "(task 1, format 0.5)" in opened.texts(".prompt .meaning")[0]
        assert opened.quiet(), (opened.requests, opened.errors)


def test_a_run_with_one_reward_has_no_such_curves(chromium: Any, tmp_path: Path) -> None:
    with tab(chromium) as opened:
        opened.open(write_report([make_run(tmp_path / "run", Made())]))
        assert not {"Rewards", "Score"} & {title.split("\n")[0] for title in opened.texts("#curves h3")}


def test_rewards_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    texts = {"rewards": ["not json", '{"<b>": "much"}', "[1]", '{"a": 0.5}']}
    run = make_run(tmp_path / "run", Made(steps=1, texts=texts, optional=("current_logp",)))
    page = write_report([run]).read_text(encoding="utf-8")
    entries = data_of(page)["runs"][0]["responses"]
    found = {entry["response"]: response_of(page, entry["block"])["rewards"] for entry in entries}
    assert set(found) == {0, 1, 2, 3}
    assert [found[n] for n in range(4)] == [{}, {}, {}, {"a": 0.5}]
