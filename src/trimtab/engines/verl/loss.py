"""The loss on verl's workers: a function of the new log-probabilities and of the plan in the batch.

The driver sends it to every rank with verl's `set_loss_fn`. It refuses batches without a plan, and batches that verl
has split into other mini-batches than were planned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.padding import response_from_nested

from trimtab.engines.verl.columns import MINIBATCH_TOKENS, SENT_COLUMNS, UPDATE, micro_batch_plan, sampled_tokens
from trimtab.engines.verl.planning import METRIC_PREFIX
from trimtab.objectives import Objective
from trimtab.own_parts import look_beside
from trimtab.trainer.config import build_objective


@dataclass(frozen=True)
class PlannedLoss:
    """A loss function for verl. It holds the objective's table, which pickles; every worker builds the objective.

    `folders` is where the driver looks for a method of the user's own (`python:MODULE:NAME`).
    """

    table: Mapping[str, Any]
    folders: tuple[str, ...] = ()

    @cached_property
    def objective(self) -> Objective:
        """Build the objective, on the worker at the first call."""
        for folder in reversed(self.folders):
            look_beside(folder)
        return build_objective(self.table)

    def __call__(
        self, model_output: Mapping[str, Any], data: Any, dp_group: Any = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss of one micro-batch and its metrics."""
        _check(data)
        sampled = sampled_tokens(data["response_mask"])
        new_logp = sampled.pack(response_from_nested(model_output["log_probs"], data["response_mask"]))
        ranks = int(data["dp_size"])
        # verl's engine may call this under autocast, but ratios must be computed in float32.
        with torch.autocast(device_type=new_logp.device.type, enabled=False):
            out = self.objective.loss(new_logp, micro_batch_plan(self.objective, data, sampled))
            loss = out.loss * ranks  # engines average gradients over ranks, and our losses add up
        # verl expects the same metrics from every micro-batch: one without tokens has a ratio of 1.
        metrics = dict.fromkeys(("update/ratio_min", "update/ratio_max"), torch.ones(())) | out.metrics
        return loss, {f"{METRIC_PREFIX}{name}": metric(name, value, ranks) for name, value in metrics.items()}


def metric(name: str, value: Tensor, ranks: int) -> Any:
    """Wrap a metric for verl, which sums over micro-batches and averages over ranks."""
    for ending, kind in (("_max", AggregationType.MAX), ("_min", AggregationType.MIN)):
        if name.endswith(ending):
            return Metric(kind, value)
    return Metric(AggregationType.SUM, value * ranks)


def _check(data: Any) -> None:
    """Raise an error unless the data hold the plan of this mini-batch."""
    if SENT_COLUMNS not in data.keys() or UPDATE not in data.keys():  # noqa: SIM118  (a TensorDict)
        raise RuntimeError(
            "trimtab: the data of this update hold no plan: the driver must run trainer.v1.trainer_mode=trimtab"
        )
    updates, tokens = data[UPDATE].unique().tolist(), data[MINIBATCH_TOKENS].unique().tolist()
    found = int(data["batch_num_tokens"])
    if len(updates) != 1 or tokens != [found]:
        raise RuntimeError(
            f"trimtab: verl split the batch into other mini-batches than were planned (updates {updates} together, "
            f"{tokens} tokens planned, {found} found), so the plan does not fit"
        )
