"""The panel of entropy control: whether the entropy is held, what the prediction explains, STARE's critical weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.insight.report_runs import Made, data_of, decode_array, make_run, trim_metrics
from trimtab.insight.replay import CriticalWeights, recorded_mini_batch, recorded_objective, set_controllers
from trimtab.insight.report import write_report
from trimtab.insight.report.tokens import mini_batches
from trimtab.objectives import Reason, theory
from trimtab.record import open_run


def control_of(run: Path) -> Any:
    return data_of(write_report([run]).read_text(encoding="utf-8"))["runs"][0]["control"]


def trim_run(folder: Path, steps: int = 60, options: str = "") -> Path:
    name = f"dapo + trim{options}"
    run = make_run(
        folder, Made(steps=2, entropy=0.3, objective={"name": name}, config=f'[objective]\nname = "{name}"\n')
    )
    (run / "metrics.jsonl").write_text(trim_metrics(steps))
    return run


def test_the_panel_says_whether_the_entropy_was_held_and_how_well_it_was_predicted(tmp_path: Path) -> None:
    panel = control_of(trim_run(tmp_path / "run"))
    held, explained = panel["sentences"]
    assert held.startswith("The entropy was held: 0.") and "over 60 measurements" in explained
    fit = panel["outcome"]["fit"]
    assert fit["points"] == 60 and 1.5 < fit["gain"] < 2.5 and fit["r2"] > 0.7
    measured, line = (decode_array(panel["outcome"][name]["values"]) for name in ("measured", "explained"))
    assert np.corrcoef(measured, line)[0, 1] ** 2 == pytest.approx(fit["r2"], rel=1e-3)
    assert decode_array(panel["outcome"]["measured"]["steps"]).tolist() == list(range(1, 61))
    assert panel["band"] == pytest.approx([0.8, 1.2]) and panel["critical"] is None


def test_with_a_ceiling_the_band_ends_there(tmp_path: Path) -> None:
    assert control_of(trim_run(tmp_path / "run", options="(floor=0.3,ceiling=0.6)"))["band"] == pytest.approx(
        [1.0, 2.0]
    )


def test_a_run_of_few_steps_has_no_fit(tmp_path: Path) -> None:
    panel = control_of(trim_run(tmp_path / "run", steps=10))
    assert panel["outcome"] is None and len(panel["sentences"]) == 1


def test_a_run_without_control_has_no_panel(tmp_path: Path) -> None:
    assert control_of(make_run(tmp_path / "run", Made(steps=2))) is None


# --- STARE's critical weight


STARE = ["stare", "stare(boost=4,target=0.01)", "dapo + stare(gate=none)", "grpo + stare(variant=C2,adaptive=true)"]


@pytest.mark.parametrize("name", STARE)
def test_the_critical_weight_balances_the_update(tmp_path: Path, name: str) -> None:
    """With the critical weight on STARE's tokens, the predicted entropy change of the recorded updates is 0."""
    records = open_run(make_run(tmp_path / "run", Made(steps=3, objective={"name": name}, entropy=0.5)))
    weights, objective = CriticalWeights(), recorded_objective({"name": name})
    for number in records.steps:
        step = records.step(number)
        weights.add(step, objective, mini_batches(step, objective.needs))
    assert weights.steps
    for number, critical in zip(weights.steps, weights.critical, strict=True):
        step = records.step(number)
        set_controllers(objective, step, recorded=True)
        gate = objective.controllers["stare"]
        gate.is_open, gate.boost = True, critical  # type: ignore[attr-defined]
        changes, boosted = [], False
        for update in step.updates:
            batch = recorded_mini_batch(update, objective.needs).batch
            plan = objective.plan(batch)
            changes.append(theory.entropy_change(objective, batch, plan))
            boosted = boosted or bool((plan.reason & int(Reason.BOOSTED)).any())
        effect = torch.cat(changes).double()
        assert boosted
        if critical > 1:  # else the update raises the entropy with any weight
            assert abs(float(effect.sum())) < 1e-5 * float(effect.abs().sum())
        else:
            assert float(effect.sum()) > 0


def test_beside_it_stands_the_weight_in_use(tmp_path: Path) -> None:
    for name, weight in (("stare(boost=1.3,gate=none)", 1.3), ("stare(boost=1.3,target=1e-9)", 1.0)):
        run = make_run(tmp_path / name, Made(steps=3, objective={"name": name}, entropy=0.5))
        panel = control_of(run)["critical"]
        assert decode_array(panel["in_use"]) == pytest.approx(weight)


def test_a_critical_boost_is_the_critical_weight_of_its_update(tmp_path: Path) -> None:
    made = Made(steps=6, updates=1, objective={"name": "stare(boost=critical,gate=none)"}, entropy=0.5)
    panel = control_of(make_run(tmp_path / "run", made))["critical"]
    critical, used = decode_array(panel["critical"]), decode_array(panel["in_use"])
    assert used == pytest.approx(np.minimum(critical, 10), rel=1e-4)
    assert critical.max() > 1


@pytest.mark.parametrize("made", [{"without": ("sum_p2",)}, {"objective": {"name": "stare(variant=O2)"}}])
def test_what_is_not_known_is_left_out(tmp_path: Path, made: dict[str, Any]) -> None:
    assert (
        control_of(
            make_run(tmp_path / "run", Made(**{"steps": 2, "entropy": 0.5, "objective": {"name": "stare"}, **made}))
        )
        is None
    )
