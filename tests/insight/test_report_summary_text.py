"""A run in plain sentences: what came of it, and nothing that was not measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from helpers.insight.report_runs import Made, make_run
from trimtab.insight.report.run_files import AlarmRecord, MetricCurve, RunFiles, read_run
from trimtab.insight.report.summary_text import facts, summary, tiles, title_of
from trimtab.record import Records


def files(curves: dict[str, list[float]], alarms: list[AlarmRecord] | None = None, skipped: int = 0) -> RunFiles:
    made = {name: MetricCurve(np.arange(1, len(v) + 1), np.array(v, np.float32)) for name, v in curves.items()}
    return RunFiles("run", {}, "", made, alarms or [], skipped, None)


def summary_of(curves: dict[str, list[float]], **more: object) -> str:
    return " ".join(summary(files(curves, **more)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([0.2, 0.5, 0.8], "Held-out accuracy rose from 20.0% to 80.0%."),
        ([0.8, 0.5], "Held-out accuracy fell from 80.0% to 50.0%."),
        ([0.5, 0.501], "Held-out accuracy hardly moved, from 50.0% to 50.1%."),
        ([0.5], "Held-out accuracy was 50.0%; it was measured only once."),
    ],
)
def test_the_summary_gives_accuracy_at_the_start_and_the_end(values: list[float], text: str) -> None:
    assert text in summary_of({"eval/accuracy": values})


def test_the_summary_says_how_much_tools_were_called_and_how_often_in_vain() -> None:
    called = {"conversation/called_share": [0.2, 0.5, 0.5, 0.9], "tools/calls": [10.0, 30.0], "tools/ok": [10.0, 20.0]}
    text = summary_of(called)
    assert "in 20.0% of the conversations at the start and in 90.0% at the end. Of all calls, 25.0% failed." in text
    assert {"name": "called a tool", "value": "90.0%", "from": "from 20.0%"} in tiles(files(called))
    assert "calls" not in summary_of({"conversation/called_share": [0.0], "tools/calls": [0.0], "tools/ok": [0.0]})


def with_accuracy(folder: Path, *values: float, problems: int = 40) -> RunFiles:
    """A run of ours with so many held-out problems, and these evaluations."""
    run = read_run(make_run(folder, Made(steps=1, config=f"[run]\neval_problems = {problems}\n")))
    curve = MetricCurve(np.arange(len(values)), np.array(values, np.float32))
    return replace(run, curves={"eval/accuracy": curve})


def test_one_problem_of_forty_is_no_rise(tmp_path: Path) -> None:
    text = " ".join(summary(with_accuracy(tmp_path / "one", 0.4, 0.425)))
    assert "Held-out accuracy went from 40.0% to 42.5% of 40 problems: no more than chance may do" in text
    assert "(+2.5 points, 95 % interval -18 to +23)" in text and "rose" not in text
    text = " ".join(summary(with_accuracy(tmp_path / "many", 0.1, 0.6)))
    assert "Held-out accuracy rose from 10.0% to 60.0% of 40 problems (+50.0 points, 95 % interval +30 to +65)." in text
    text = " ".join(summary(with_accuracy(tmp_path / "fell", 0.4, 0.375, problems=10_000)))
    assert "Held-out accuracy fell from 40.0% to 37.5% of 10,000 problems" in text


def test_fewer_held_out_problems_than_asked_for_are_those_that_count(tmp_path: Path) -> None:
    run = with_accuracy(tmp_path / "run", 0.25, 0.75, problems=200)
    assert "rose from 25.0% to 75.0% of 200 problems" in " ".join(summary(run))
    few = MetricCurve(np.arange(2), np.array([4, 4], np.float32))
    assert "of 4 problems: no more than chance may do" in " ".join(
        summary(replace(run, curves={**run.curves, "eval/problems": few}))
    )


def test_a_collapse_is_told_by_the_definition_that_alarms_use() -> None:
    assert "It did not collapse." in summary_of({"reward/accuracy": [0.5] * 40})
    text = summary_of({"reward/accuracy": [0.5] * 20 + [0.1] * 20})
    assert "It collapsed at step 23: accuracy is 0.10; its best was 0.50." in text
    assert "collapse" not in summary_of({"reward/mean": [0.5] * 40})


def test_a_run_that_was_never_tested_says_so() -> None:
    assert "It was never tested on held-out problems." in summary_of({"reward/mean": [0.5]})


def test_reward_and_entropy_go_from_the_first_step_to_a_mean_over_the_last_ones() -> None:
    curves = {"reward/mean": [0.0, 1.0] * 4 + [2.0, 4.0] * 4, "policy/entropy": [1.0] * 8 + [0.01] * 8}
    text = summary_of(curves)
    assert "The mean reward rose from 0.000 to 3.000." in text
    assert "entropy fell from 1.000 to 0.010 nats per token. Near zero, the model hardly explores any more." in text


def test_a_run_that_broke_in_its_first_steps_is_compared_with_its_start_and_gets_advice() -> None:
    """It recovers a little, which a mean over its first steps would call a rise."""
    broken = {"reward/mean": [0.54] + [0.05] * 20 + [0.2] * 20, "eval/accuracy": [0.5] + [0.0] * 40}
    text = summary_of(broken, alarms=[AlarmRecord(4, "ratio"), AlarmRecord(9, "reward_drop"), AlarmRecord(30, "ratio")])
    assert "The mean reward fell from 0.540 to 0.200." in text
    assert "It collapsed at step 2: accuracy is 0.00; its best was 0.50." in text
    assert "Go back to a checkpoint before step 2, or train again, with a lower update.lr." in text
    assert "3 alarms were raised, the first at step 4: ratio. Then rang reward_drop (step 9)." in text
    shown = {tile["name"]: tile["from"] for tile in tiles(files(broken))}
    assert shown["reward"] == "from 0.540"


def test_a_run_that_ends_low_is_not_said_to_have_held() -> None:
    text = summary_of({"eval/accuracy": [0.5, 0.4, 0.0], "reward/accuracy": [0.5, 0.3, 0.1]})
    assert "It fell at step 3 to below 50% of its best, and ended there: accuracy is 0.00; its best was 0.50." in text
    assert "did not collapse" not in text


def test_a_reward_that_varies_as_much_from_step_to_step_hardly_moved() -> None:
    assert "hardly moved, from 0.500 to 0.542" in summary_of({"reward/mean": [0.5, 0.6, 0.48, 0.58, 0.49, 0.6] * 4})


def test_held_out_scores_and_what_the_time_went_to_are_told() -> None:
    curves = {"eval/score": [0.5, 1.5], "time/update": [3.0, 3.0], "time/grading": [1.0, 1.0]}
    assert "The mean score on held-out problems went from 0.500 to 1.500." in summary_of(curves)
    assert "Its time: updates 75.0%, grading 25.0%." in summary_of(curves)
    (tile,) = tiles(files({"eval/score": [0.5, 1.5]}))
    assert tile == {"name": "held-out score", "value": "1.500", "from": "from 0.500"}


def test_shares_are_told_as_one_in_so_many() -> None:
    text = summary_of(
        {"tokens/silenced_share": [1e-4, 3e-4], "update/clip_share": [0.25, 0.25], "tokens/boosted_share": [0.0]}
    )
    assert "one in 5,000 was silenced" in text
    assert "25.0% was clipped" in text and "none was boosted" in text


def test_silencing_that_touched_almost_nothing_is_told_with_the_sweep_to_try() -> None:
    curves = {"tokens/silenced_share": [0.0, 1e-6], "s2t/candidate_share": [0.0, 1e-6]}
    run = replace(files(curves), config={"objective": {"name": "stapo", "tau_p": 0.05}})
    assert "replay" not in " ".join(summary(run)), "nothing was recorded"
    text = " ".join(summary(replace(run, records=cast(Records, object()))))
    assert "S2T silenced almost nothing (0.000050% of the tokens)" in text
    assert "`trimtab replay RUN --sweep tau_p=0.2,0.5`." in text
    other = replace(run, curves={**run.curves, "s2t/candidate_share": run.curves["tokens/silenced_share"]})
    del other.curves["s2t/candidate_share"]
    assert "almost nothing" not in " ".join(summary(other))


def test_alarms_and_updates_that_were_not_taken_are_told() -> None:
    text = summary_of({"reward/mean": [1.0]}, alarms=[AlarmRecord(7, "collapse"), AlarmRecord(9, "other")], skipped=3)
    assert "2 alarms were raised, the first at step 7: collapse." in text
    assert "3 updates were not taken because something was not finite." in text


def test_a_run_in_which_nothing_was_measured_says_only_that() -> None:
    assert summary(files({})) == ["Nothing was measured in this run, so there is nothing to say about how it went."]


def test_tiles_show_only_what_there_is() -> None:
    shown = tiles(files({"reward/mean": [0.25, 0.5], "tokens/silenced_share": [2.5e-4]}))
    assert shown == [
        {"name": "reward", "value": "0.500", "from": "from 0.250"},
        {"name": "silenced", "value": "0.025%", "from": "of all tokens"},
    ]


def test_length_tokens_and_time_are_told(tmp_path: Path) -> None:
    text = " ".join(summary(read_run(make_run(tmp_path / "run", Made(steps=4)))))
    assert "The run took 4 of 8 steps, 132 response tokens." in text


def test_the_title_is_in_words_where_the_configuration_is_ours(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", Made(steps=1)))
    assert title_of(run) == "the demo model on 2-digit addition with stapo (tau_p=0.2)"
    foreign = read_run(make_run(tmp_path / "other", Made(steps=1, config="[objective]\nname = 'x'\n")))
    assert title_of(foreign) == "x"


def test_facts_name_objective_seed_and_records(tmp_path: Path) -> None:
    shown = {fact["name"]: fact["value"] for fact in facts(read_run(make_run(tmp_path / "run", Made(steps=4))))}
    assert shown == {"objective": "stapo (tau_p=0.2)", "seed": "3", "last step": "4", "recorded steps": "4"}
