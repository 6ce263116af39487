"""The panel of entropy control: the entropy and its band, predictions and outcomes, and STARE's critical weight."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.collapse import merge_curves
from trimtab.entropy_control import (
    ENTROPY,
    HELD_WITHIN,
    MIN_POINTS,
    PREDICTED,
    TARGET,
    consecutive_steps,
    control_sentences,
    prediction_fit,
    prediction_pairs,
)
from trimtab.insight.replay import RecordedMiniBatch, gradient_coefficients, replan, set_controllers
from trimtab.insight.report.curves import curve_json
from trimtab.insight.report.embed import encode_array
from trimtab.insight.report.run_files import RunFiles
from trimtab.insight.report.token_table import mini_batches
from trimtab.objectives import EntropyGate, Objective, Plan, Reason, theory
from trimtab.record import RecordedStep


@dataclass
class CriticalWeights:
    """STARE's critical weight at recorded steps, beside the weight that was in use; empty for other objectives."""

    steps: list[int] = field(default_factory=list)
    critical: list[float] = field(default_factory=list)
    in_use: list[float] = field(default_factory=list)

    def add(self, step: RecordedStep, recorded: Objective | None) -> None:
        """Add a step that was recorded under this objective."""
        gates = recorded.controllers.values() if recorded else ()
        gate = next((gate for gate in gates if isinstance(gate, EntropyGate)), None)
        if recorded is None or gate is None or "sum_p2" not in step.tokens or "sum_p2_logp" not in step.tokens:
            return
        batches = mini_batches(step, recorded.needs)
        set_controllers(recorded, step, recorded=True)
        used = [_weight_in_use(recorded, gate, batch) for batch in batches]
        # As if the gate were open and the weight 1: the plan then names the tokens that STARE would boost.
        gate.is_open, gate.boost = True, 1.0
        sums = [_effects(recorded, batch) for batch in batches]
        total, boosted = (math.fsum(column) for column in zip(*sums, strict=True)) if sums else (0.0, 0.0)
        if boosted > 0:  # else the boosted tokens do not raise the entropy, and no weight on them balances the others
            self.steps.append(step.number)
            self.critical.append(max(1.0, 1 - total / boosted))
            self.in_use.append(sum(used) / len(used))

    def to_json(self) -> dict[str, Any] | None:
        """Return both curves for the page."""
        if not self.steps:
            return None
        curves = {"steps": encode_array(self.steps, "i4"), "critical": encode_array(self.critical)}
        return curves | {"in_use": encode_array(self.in_use)}


def _weight_in_use(recorded: Objective, gate: EntropyGate, mini_batch: RecordedMiniBatch) -> float:
    """Return the weight on STARE's boosted tokens in an update; 1 where its gate was closed."""
    metrics = replan(recorded, mini_batch.batch, mini_batch.update)[0].metrics
    return float(metrics.get("stare/weight", gate.boost)) if metrics["stare/gate_open"] else 1.0


def _effects(recorded: Objective, mini_batch: RecordedMiniBatch) -> tuple[float, float]:
    """Return the predicted entropy change of an update with weight 1 on STARE's boosted tokens: of all, of these."""
    # Penalties and trim are left out: the one has no weight, the other would hide which tokens STARE boosts.
    rules = tuple(rule for rule in recorded.rules if rule.name != "trim")
    objective, batch = replace(recorded, rules=rules, penalties=()), mini_batch.batch
    plans = [_without_boost(plan) for plan in replan(objective, batch, mini_batch.update)]
    coefficient, _ = gradient_coefficients(objective, plans, batch.judged_logp)
    effect = (-coefficient * theory.batch_phi(batch)).double()
    return float(effect.sum()), float(effect[torch.cat([_boosted(plan) for plan in plans])].sum())


def _boosted(plan: Plan) -> Tensor:
    return (plan.reason & int(Reason.BOOSTED)) != 0


def _without_boost(plan: Plan) -> Plan:
    """Return the plan with weight 1 on the boosted tokens; boost=critical has weighed them already."""
    factor = plan.metrics.get("stare/weight", torch.ones(()))
    return replace(plan, weight=torch.where(_boosted(plan), plan.weight / factor, plan.weight))


def control_json(
    run: RunFiles, recorded: Objective | None, weights: CriticalWeights, points: int
) -> dict[str, Any] | None:
    """Return the panel's data: sentences, the band around the target, and curves; None for a run without control."""
    if PREDICTED not in run.curves and not weights.steps:
        return None
    names = [name for name in (ENTROPY, PREDICTED, TARGET) if name in run.curves]
    curves = {name: run.curves[name] for name in names}
    records = merge_curves({n: zip(c.steps.tolist(), c.values.tolist(), strict=True) for n, c in curves.items()})
    return {
        "sentences": control_sentences(records, recorded.entropy_target if recorded else None),
        "band": _relative_band(recorded),
        "outcome": _outcome_json(records, points),
        "critical": weights.to_json(),
    }


def _relative_band(recorded: Objective | None) -> list[float]:
    """Return both ends of the band relative to the target: what counts as held, or from the floor to the ceiling."""
    for controller in recorded.controllers.values() if recorded else ():
        floor, ceiling = (getattr(controller, name, None) for name in ("floor", "ceiling"))
        if floor and ceiling:
            return [1.0, ceiling / floor]
    return [1 - HELD_WITHIN, 1 + HELD_WITHIN]


def _outcome_json(records: list[dict[str, float]], points: int) -> dict[str, Any] | None:
    """Return the measured changes of the entropy, what the prediction explains of them, and their fit over the run."""
    rows = list(consecutive_steps(records))
    predicted, entropy = [row[1] for row in rows], [row[2] for row in rows]
    fit = prediction_fit(predicted, entropy)
    if fit is None or fit.points < MIN_POINTS:
        return None
    pairs = zip(rows, prediction_pairs(predicted, entropy), strict=False)
    found = np.array([(row[0], *pair) for row, pair in pairs if all(map(math.isfinite, pair))])
    steps, expected, measured = found.T
    curves = {
        "explained": curve_json(points, steps, fit.gain * expected + fit.drift),
        "measured": curve_json(points, steps, measured),
    }
    return {"fit": asdict(fit), **curves}
