"""From a recorded update back to the batch that was planned over, and to the plan itself.

On a complete record the objective that was recorded gives its recorded plan again bit for bit: the batch is what it
was, controllers are put back to where they stood, and with `scope = "micro"` the parts are those of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.config import build_objective
from trimtab.objectives import Objective, Plan, TokenBatch, segment_ids
from trimtab.record import RecordedStep, RecordedUpdate, RecordError

# What every replay reads, where it is there; other fields are read for the objectives that need them.
COLUMNS = ("old_logp", "current_logp", "proxy_logp", "entropy", "sum_p2", "sum_p2_logp", "advantage")
OPTIONAL = frozenset({"sampler_logp", "ref_logp", "segment"})


def recorded_objective(options: dict[str, Any]) -> Objective:
    """The objective that a manifest names, as the run had it."""
    try:
        return build_objective(options)
    except (ValueError, LookupError) as error:
        raise RecordError(f"the recorded objective cannot be built with this trimtab: {error}") from None


def load_columns(step: RecordedStep, needs: Iterable[str]) -> None:
    """Read at one go what `to_token_batch` and a replay will ask for."""
    wanted = {*COLUMNS, "new_logp", *(OPTIONAL & set(needs))}
    if "segment" in wanted and "segment" not in step.tokens:
        wanted |= {"token"}
    step.tokens.load([name for name in step.tokens if name in wanted])


def to_token_batch(update: RecordedUpdate, needs: Iterable[str] = ()) -> TokenBatch:
    """The mini-batch of a recorded update; `needs` names the optional fields that an objective reads."""
    step = update.step
    present = [name for name in (*COLUMNS, *sorted(OPTIONAL & set(needs))) if name in step.tokens]
    fields: dict[str, Any] = {name: tensor(update.column(name)) for name in present}
    lengths = tensor(step.responses["tokens"][update.responses])
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths.to(torch.int64))
    if "segment" in needs and "segment" not in fields:
        spelling = step.records.vocabulary.text_bytes
        fields["segment"] = segment_ids(tensor(update.column("token")).long(), spelling, sequence=sequence)
    return TokenBatch(
        **fields,
        sequence=sequence,
        group=tensor(step.responses["group"][update.responses]),
        reward=tensor(step.responses["reward"][update.responses]),
        responses=len(lengths),
    )


def as_advantaged(batch: TokenBatch, objective: Objective, update: RecordedUpdate) -> TokenBatch:
    """The batch with the kind of advantages that the objective is defined with; groups are whole in every record."""
    step = update.step
    if objective.advantage == step.records.manifest.advantage:
        return batch
    values = objective.advantages(tensor(step.responses["reward"]), tensor(step.responses["group"]))
    return replace(batch, advantage=values[update.responses][batch.sequence])


def plan_again(objective: Objective, batch: TokenBatch, update: RecordedUpdate) -> list[Plan]:
    """The plan of a recorded update; its parts where they were planned one by one, else the one plan."""
    plan = objective.plan(batch)
    if plan.replan is None:
        return [plan]
    parts = update.info.micro_batches
    return plan.split(parts if sum(parts) == batch.responses else [batch.responses])


def set_controllers(objective: Objective, step: RecordedStep, recorded: bool) -> None:
    """Bring the controllers to where they stand at a step: as recorded, or by a look at the rollout's entropy."""
    if recorded:
        objective.load_state_dict(step.info.controllers)
        return
    entropy = step.info.observed_entropy
    for controller in objective.controllers.values():
        controller.observe(float("nan") if entropy is None else entropy)


@contextmanager
def threads_of(step: RecordedStep) -> Iterator[None]:
    """As many threads as the run had, for sums depend on them in the last bit; one for a run on a GPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(step.info.threads, 1) if step.info.device == "cpu" else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def new_log_probs(update: RecordedUpdate, batch: TokenBatch) -> Tensor:
    """The log-probabilities of the update's own pass; where there are none, those that tokens were judged by."""
    if "new_logp" not in update.step.tokens:
        return batch.judged_logp
    recorded = tensor(update.column("new_logp"))
    return recorded if update.info.taken else torch.where(recorded.isfinite(), recorded, batch.judged_logp)


def tensor(values: np.ndarray[Any, Any]) -> Tensor:
    """A column as a tensor, with memory of its own where the column's is read-only, which torch does not know."""
    return torch.from_numpy(values if values.flags.writeable else values.copy())
