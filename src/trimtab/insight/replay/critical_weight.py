"""STARE's critical weight at recorded steps: the one at which an update leaves the entropy unchanged to first order."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from trimtab.insight.replay.batches import (
    RecordedMiniBatch,
    gradient_coefficients,
    recorded_mini_batch,
    replan,
    set_controllers,
)
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
        batches = [recorded_mini_batch(update, recorded.needs) for update in step.updates if update.info.tokens]
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
