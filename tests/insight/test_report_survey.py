"""Planes, quadrants and quantiles add up to the tokens that were read, and long runs are sampled evenly."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.insight.report_runs import Made, make_run, unpack
from trimtab.insight.replay.batches import recorded_objective
from trimtab.insight.report import survey as surveying
from trimtab.insight.report.measured import Measured, measure, open_step
from trimtab.insight.report.run_files import read_run
from trimtab.insight.report.survey import Survey, choose_steps
from trimtab.objectives import theory


def measured_steps(run: Path) -> list[Measured]:
    files = read_run(run)
    assert files.records is not None
    objective = recorded_objective(files.records.manifest.objective)
    return [measure(open_step(files.records, step), objective) for step in files.records.steps]


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[Measured]:
    made = Made(steps=5, lengths=(40, 30, 20, 10), objective={"name": "dapo"})
    return measured_steps(make_run(tmp_path_factory.mktemp("survey") / "run", made))


@pytest.fixture(scope="module")
def survey(steps: list[Measured]) -> Survey:
    survey = Survey(h_most=3.0, alarmed=frozenset({2}), ends=frozenset({1, 5}))
    for step in steps:
        survey.add(step)
    return survey


def test_every_token_is_in_one_cell_of_the_plane(survey: Survey, steps: list[Measured]) -> None:
    assert survey.tokens == 500 == survey.plane[:3].sum()
    rewarded = sum(int((step.treated.advantage > 0).sum()) for step in steps)
    assert survey.plane[0].sum() == rewarded
    silenced = sum(int((step.treated.reason == 2).sum()) for step in steps)
    assert survey.plane[3].sum() == silenced > 0


def test_cells_are_where_numpy_puts_them(survey: Survey, steps: list[Measured]) -> None:
    x = np.concatenate([step.logp for step in steps]) / math.log(10)
    y = np.concatenate([step.entropy for step in steps])
    bins = [np.linspace(0, 3.0, surveying.H_BINS + 1), np.linspace(*surveying.P_RANGE, surveying.P_BINS + 1)]
    expected, _, _ = np.histogram2d(y, x, bins=bins)
    assert np.abs(survey.plane[:3].sum(0) - expected).sum() <= 4  # values on an edge may fall to either side


def test_quadrants_are_the_theorys(survey: Survey, steps: list[Measured]) -> None:
    counts = np.zeros(5)
    for step in steps:
        moments = [torch.tensor(v) for v in (step.entropy, step.sum_p2, step.sum_p2_logp)]
        s_star = theory.critical_surprisal(*moments)
        code = theory.quadrant(torch.tensor(step.treated.advantage), torch.tensor(step.logp), s_star)
        counts += np.bincount(code.numpy(), minlength=5)
    assert survey.quadrants[:, 0].tolist() == pytest.approx(counts[1:].tolist(), abs=1)
    assert survey.quadrant_plane.sum() == counts[1:].sum() + counts[0]


def test_quantiles_are_those_of_each_step(survey: Survey, steps: list[Measured]) -> None:
    assert survey.steps == [1, 2, 3, 4, 5]
    for row, step in zip(survey.quantiles, steps, strict=True):
        assert row == pytest.approx(np.quantile(step.entropy, surveying.QUANTILES).tolist())


def test_the_largest_gradients_are_among_the_candidates(survey: Survey, steps: list[Measured]) -> None:
    everything = np.concatenate([step.gradient for step in steps])
    scores = sorted((candidate.score for candidate in survey.candidates["gradient"]), reverse=True)
    best = np.sort(everything[everything > 0])[::-1]
    count = min(surveying.TOP_TOKENS, len(best))
    assert scores[:count] == pytest.approx(best[:count].tolist())


def test_candidates_point_at_the_token_that_makes_them_worth_a_look(survey: Survey, steps: list[Measured]) -> None:
    for candidate in survey.candidates["gradient"]:
        measured = steps[candidate.step - 1]
        at = measured.step.offsets[candidate.response] + candidate.position
        assert measured.gradient[at] == pytest.approx(candidate.score)
    for candidate in survey.candidates["silenced"]:
        measured = steps[candidate.step - 1]
        at = measured.step.offsets[candidate.response] + candidate.position
        assert measured.treated.reason[at] == 2


def test_alarm_steps_ends_and_random_ones_give_candidates_too(survey: Survey) -> None:
    assert {candidate.step for candidate in survey.candidates["alarm"]} == {2}
    assert {candidate.step for candidate in survey.candidates["ends"]} == {1, 5}
    assert {candidate.step for candidate in survey.candidates["random"]} == {1, 2, 3, 4, 5}
    assert {candidate.length for candidate in survey.candidates["longest"]} == {40}


def test_candidates_do_not_pile_up(steps: list[Measured], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surveying, "KEPT", 7)
    survey = Survey(h_most=3.0)
    for step in steps * 3:
        survey.add(step)
    assert all(len(found) <= 7 for found in survey.candidates.values())
    everything = np.concatenate([step.gradient for step in steps])
    assert max(c.score for c in survey.candidates["gradient"]) == pytest.approx(everything.max())


def test_a_survey_is_the_same_twice(steps: list[Measured]) -> None:
    one, two = Survey(h_most=3.0), Survey(h_most=3.0)
    for step in steps:
        one.add(step)
        two.add(step)
    assert one.candidates == two.candidates and one.packed() == two.packed()


def test_a_survey_of_nothing_can_be_shown() -> None:
    packed = Survey(h_most=3.0).packed()
    assert packed["tokens"] == 0
    assert unpack(packed["quantiles"]["steps"]).tolist() == []
    assert unpack(packed["plane"]["counts"]["rewarded"]).sum() == 0


def test_a_record_without_entropies_gives_candidates_and_no_planes(tmp_path: Path) -> None:
    made = Made(steps=1, objective={"name": "grpo"}, without=("entropy",))
    survey = Survey(h_most=3.0)
    for step in measured_steps(make_run(tmp_path / "run", made)):
        survey.add(step)
    assert survey.steps == [] and survey.plane.sum() == 0
    assert survey.candidates["random"] and survey.tokens > 0


def test_a_short_run_is_read_whole(tmp_path: Path) -> None:
    chosen = choose_steps(read_run(make_run(tmp_path / "run", Made(steps=6))))
    assert chosen.even == [1, 2, 3, 4, 5, 6] and chosen.pointed == []


def test_a_long_run_is_sampled_evenly_and_where_metrics_alarms_and_the_reader_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MOST_STEPS": 5, "FEWEST_STEPS": 5, "MOST_POINTED": 2}.items():
        monkeypatch.setattr(surveying, name, value)
    run = make_run(tmp_path / "run", Made(steps=41, alarms=[{"step": 17, "alarm": "x"}]))
    chosen = choose_steps(read_run(run), asked=[8, 999])
    assert chosen.even == [1, 11, 21, 31, 41]
    assert {8, 17} <= set(chosen.pointed)
    assert 40 in chosen.pointed  # silenced_share rises with the steps: the highest that is not there yet
    assert not set(chosen.pointed) & set(chosen.even)


def test_large_steps_make_a_smaller_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surveying, "MOST_TOKENS", 10 * 33)
    monkeypatch.setattr(surveying, "FEWEST_STEPS", 3)
    run = read_run(make_run(tmp_path / "run", Made(steps=30)))
    assert len(choose_steps(run).even) == 10
    monkeypatch.setattr(surveying, "MOST_TOKENS", 1)
    assert len(choose_steps(run).even) == 3
