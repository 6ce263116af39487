"""That planning the records of a run again gives its recorded plans, bit for bit."""

from __future__ import annotations

import numpy as np
import torch

from trimtab.insight.replay.batches import (
    recorded_mini_batch,
    recorded_objective,
    recorded_threads,
    replan,
    set_controllers,
    with_advantages_of,
)
from trimtab.record import Records

PLAN = ("weight", "scale", "clip_low", "clip_high", "reason", "penalty", "entropy_coef")


def assert_plans_come_again(records: Records) -> dict[int, int]:
    """Compare every column of every update's plan; return how many tokens had each reason."""
    objective = recorded_objective(records.manifest.objective)
    needs, seen = objective.needs | {"segment"}, dict[int, int]()
    for step in records:
        set_controllers(objective, step, recorded=True)
        for update in step.updates:
            with recorded_threads(step):
                recorded = recorded_mini_batch(update, needs)
                batch, new = recorded.batch, recorded.new_logp
                assert with_advantages_of(batch, objective, update) is batch
                plans = replan(objective, batch, update)
                clipped = [objective.loss_and_grad(new[plan.slice], plan)[0].clipped for plan in plans]
            for name in PLAN:
                values = [getattr(plan, name) for plan in plans]
                assert (name in step.tokens) == (values[0] is not None), name
                if values[0] is not None:
                    assert_bits(torch.cat(values), update.column(name), f"{name} at step {step.number}")
            planned = "planned_advantage" if "planned_advantage" in step.tokens else "advantage"
            assert_bits(torch.cat([plan.advantage for plan in plans]), update.column(planned), planned)
            if clipped[0] is not None and "new_logp" in step.tokens:  # the passes of verl's workers are not recorded
                assert_bits(torch.cat(clipped), update.column("clipped"), "clipped")  # type: ignore[arg-type]
            for code, count in zip(*np.unique(update.column("reason"), return_counts=True), strict=True):
                seen[int(code)] = seen.get(int(code), 0) + int(count)
    return seen


def assert_bits(made: torch.Tensor, recorded: np.ndarray, column: str) -> None:  # type: ignore[type-arg]
    assert made.numpy().astype(recorded.dtype).tobytes() == recorded.tobytes(), column
