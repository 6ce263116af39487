"""Heat maps, quadrants and quantiles add up to the tokens that were read; candidates point at notable tokens."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.insight.report_runs import Made, decode_array, make_run
from trimtab.insight.replay import recorded_objective
from trimtab.insight.report import microscope
from trimtab.insight.report.microscope import TOP_TOKENS, CandidatePool
from trimtab.insight.report.run_files import read_run
from trimtab.insight.report.tokens import (
    H_BINS,
    P_BINS,
    P_RANGE,
    QUANTILES,
    StepTokenTable,
    TokenStatistics,
    token_table,
)
from trimtab.objectives import theory


def read_tables(run: Path) -> list[StepTokenTable]:
    files = read_run(run)
    assert files.records is not None
    objective = recorded_objective(files.records.manifest.objective)
    return [token_table(files.records.step(step), objective) for step in files.records.steps]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> list[StepTokenTable]:
    made = Made(steps=5, lengths=(40, 30, 20, 10), objective={"name": "dapo"})
    return read_tables(make_run(tmp_path_factory.mktemp("statistics") / "run", made))


@pytest.fixture(scope="module")
def statistics(tables: list[StepTokenTable]) -> TokenStatistics:
    statistics = TokenStatistics(h_max=3.0)
    for table in tables:
        statistics.add(table)
    return statistics


@pytest.fixture(scope="module")
def pool(tables: list[StepTokenTable]) -> CandidatePool:
    pool = CandidatePool(alarm_steps=frozenset({2}), end_steps=frozenset({1, 5}))
    for table in tables:
        pool.add(table, sample=True)
    return pool


def test_every_token_is_in_one_cell_of_the_heat_map(statistics: TokenStatistics, tables: list[StepTokenTable]) -> None:
    assert statistics.tokens == 500 == statistics.probability_entropy[:3].sum()
    rewarded = sum(int((table.effects.advantage > 0).sum()) for table in tables)
    assert statistics.probability_entropy[0].sum() == rewarded
    silenced = sum(int((table.effects.reason == 2).sum()) for table in tables)
    assert statistics.probability_entropy[3].sum() == silenced > 0


def test_cells_are_those_of_numpys_histogram(statistics: TokenStatistics, tables: list[StepTokenTable]) -> None:
    x = np.concatenate([table.logp for table in tables]) / math.log(10)
    y = np.concatenate([table.entropy for table in tables])
    bins = [np.linspace(0, 3.0, H_BINS + 1), np.linspace(*P_RANGE, P_BINS + 1)]
    expected, _, _ = np.histogram2d(y, x, bins=bins)
    found = statistics.probability_entropy[:3].sum(0)
    assert np.abs(found - expected).sum() <= 4  # values on an edge may fall to either side


def test_quadrants_are_the_theorys(statistics: TokenStatistics, tables: list[StepTokenTable]) -> None:
    counts = np.zeros(5)
    for table in tables:
        moments = [torch.tensor(v) for v in (table.entropy, table.sum_p2, table.sum_p2_logp)]
        s_star = theory.critical_surprisal(*moments)
        code = theory.quadrant(torch.tensor(table.effects.advantage), torch.tensor(table.logp), s_star)
        counts += np.bincount(code.numpy(), minlength=5)
    assert statistics.quadrants[:, 0].tolist() == pytest.approx(counts[1:].tolist(), abs=1)
    assert statistics.surprisal_advantage.sum() == counts[1:].sum() + counts[0]


def test_quantiles_are_those_of_each_step(statistics: TokenStatistics, tables: list[StepTokenTable]) -> None:
    assert statistics.steps == [1, 2, 3, 4, 5]
    for row, table in zip(statistics.quantiles, tables, strict=True):
        assert row == pytest.approx(np.quantile(table.entropy, QUANTILES).tolist())


def test_statistics_of_nothing_can_be_shown() -> None:
    data = TokenStatistics(h_max=3.0).to_json()
    assert data["tokens"] == 0
    assert decode_array(data["entropy_quantiles"]["steps"]).tolist() == []
    assert decode_array(data["probability_entropy"]["counts"]["rewarded"]).sum() == 0


def test_a_record_without_entropies_gives_candidates_and_no_heat_maps(tmp_path: Path) -> None:
    made = Made(steps=1, objective={"name": "grpo"}, without=("entropy",))
    statistics, pool = TokenStatistics(h_max=3.0), CandidatePool()
    for table in read_tables(make_run(tmp_path / "run", made)):
        statistics.add(table)
        pool.add(table, sample=True)
    assert statistics.steps == [] and statistics.probability_entropy.sum() == 0
    assert pool.candidates["random"] and statistics.tokens > 0


# --- candidates for the microscope


def test_the_largest_gradients_are_among_the_candidates(pool: CandidatePool, tables: list[StepTokenTable]) -> None:
    everything = np.concatenate([table.grad_norm for table in tables])
    scores = sorted((candidate.score for candidate in pool.candidates["gradient"]), reverse=True)
    best = np.sort(everything[everything > 0])[::-1]
    count = min(TOP_TOKENS, len(best))
    assert scores[:count] == pytest.approx(best[:count].tolist())


def test_candidates_point_at_their_notable_token(pool: CandidatePool, tables: list[StepTokenTable]) -> None:
    for candidate in pool.candidates["gradient"]:
        table = tables[candidate.step - 1]
        at = table.step.offsets[candidate.response] + candidate.position
        assert table.grad_norm[at] == pytest.approx(candidate.score)
    for candidate in pool.candidates["silenced"]:
        table = tables[candidate.step - 1]
        at = table.step.offsets[candidate.response] + candidate.position
        assert table.effects.reason[at] == 2


def test_alarm_steps_first_and_last_steps_and_random_ones_give_candidates_too(pool: CandidatePool) -> None:
    assert {candidate.step for candidate in pool.candidates["alarm"]} == {2}
    assert {candidate.step for candidate in pool.candidates["ends"]} == {1, 5}
    assert {candidate.step for candidate in pool.candidates["random"]} == {1, 2, 3, 4, 5}
    assert {candidate.length for candidate in pool.candidates["longest"]} == {40}


def test_the_pool_keeps_only_the_best_candidates(tables: list[StepTokenTable], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microscope, "POOL_SIZE", 7)
    pool = CandidatePool()
    for table in tables * 3:
        pool.add(table, sample=True)
    assert all(len(found) <= 7 for found in pool.candidates.values())
    everything = np.concatenate([table.grad_norm for table in tables])
    assert max(c.score for c in pool.candidates["gradient"]) == pytest.approx(everything.max())


def test_the_same_tokens_give_the_same_statistics_and_candidates(tables: list[StepTokenTable]) -> None:
    statistics, pools = [TokenStatistics(h_max=3.0) for _ in range(2)], [CandidatePool() for _ in range(2)]
    for table in tables:
        for number in range(2):
            statistics[number].add(table)
            pools[number].add(table, sample=True)
    assert pools[0].candidates == pools[1].candidates and statistics[0].to_json() == statistics[1].to_json()
