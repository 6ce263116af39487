"""The loss on verl's workers: a short function of the new log-probabilities and the plan that came with the data.

It goes to every rank through verl's own `set_loss_fn`. It refuses data that were not planned, or that are cut into
other mini-batches than those which were planned.
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

from trimtab.engines.common import make_objective
from trimtab.engines.verl.columns import SENT, TOKENS, UPDATE, part_plan, sampled
from trimtab.engines.verl.planning import METRICS
from trimtab.objectives import Objective


@dataclass(frozen=True)
class PlannedLoss:
    """verl's loss function: the table of an objective, as plain values; every worker builds its own."""

    table: Mapping[str, Any]

    @cached_property
    def objective(self) -> Objective:
        """The objective, built on the worker at the first call."""
        return make_objective(self.table)

    def __call__(
        self, model_output: Mapping[str, Any], data: Any, dp_group: Any = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """The loss of one micro-batch, and its metrics. Engines average over ranks, so it is scaled by their number."""
        _check(data)
        where = sampled(data["response_mask"])
        new_logp = where.pack(response_from_nested(model_output["log_probs"], data["response_mask"]))
        ranks = int(data["dp_size"])
        # The engine may call under autocast; ratios are made in float32.
        with torch.autocast(device_type=new_logp.device.type, enabled=False):
            out = self.objective.loss(new_logp, part_plan(self.objective, data, where))
            loss = out.loss * ranks
        return loss, {f"{METRICS}{name}": metric(name, value, ranks) for name, value in _all(out.metrics).items()}


def metric(name: str, value: Tensor, ranks: int) -> Any:
    """A metric for verl, which adds up micro-batches and averages over ranks."""
    for ending, kind in (("_max", AggregationType.MAX), ("_min", AggregationType.MIN)):
        if name.endswith(ending):
            return Metric(kind, value)
    return Metric(AggregationType.SUM, value * ranks)


def _all(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    """The metrics, with a ratio of 1 where there are no tokens: verl wants the same ones of every micro-batch."""
    one = torch.ones(())
    return {"update/ratio_min": one, "update/ratio_max": one, **metrics}


def _check(data: Any) -> None:
    """Stop unless the data carry a plan, and one of this very mini-batch."""
    if SENT not in data.keys() or UPDATE not in data.keys():  # noqa: SIM118  (a TensorDict)
        raise RuntimeError(
            "trimtab: the data of this update carry no plan: the driver must run trainer.v1.trainer_mode=trimtab"
        )
    updates, tokens = data[UPDATE].unique().tolist(), data[TOKENS].unique().tolist()
    seen = int(data["batch_num_tokens"])
    if len(updates) != 1 or tokens != [seen]:
        raise RuntimeError(
            f"trimtab: verl cut the batch into other mini-batches than were planned (updates {updates} together, "
            f"{tokens} tokens planned, {seen} there): no update is taken on a plan of something else"
        )
