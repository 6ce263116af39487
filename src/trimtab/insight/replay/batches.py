"""Rebuild the mini-batches of a recorded run, and plan them again under any objective.

On a complete record the recorded objective gives its recorded plan again bit for bit: the batch is the same,
controllers are set to their recorded state, and with `scope = "micro"` the micro-batches are those of the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab.objectives import EntropyGate, Objective, Plan, Reason, TokenBatch, segment_ids, theory
from trimtab.own_parts import own_names, was_loaded
from trimtab.record import RecordedStep, RecordedUpdate, RecordError
from trimtab.trainer.config import build_objective

# Read for every replay if recorded; optional fields are read for the objectives that need them.
COLUMNS = ("old_logp", "current_logp", "proxy_logp", "entropy", "sum_p2", "sum_p2_logp", "advantage")
OPTIONAL = frozenset({"sampler_logp", "ref_logp", "segment"})


@dataclass(frozen=True)
class TokenEffects:
    """What an objective does with each token of a mini-batch or a step: arrays (tokens,).

    `coefficient` is minus d loss / d log-prob.
    """

    coefficient: NDArray[Any]
    advantage: NDArray[Any]
    weight: NDArray[Any]
    reason: NDArray[Any]
    clipped: NDArray[Any]
    clip_low: NDArray[Any]
    clip_high: NDArray[Any]


@dataclass(frozen=True)
class RecordedMiniBatch:
    """A recorded update, its mini-batch, and its new log-probabilities (the judged ones if those are not recorded)."""

    update: RecordedUpdate
    batch: TokenBatch
    new_logp: Tensor


def recorded_objective(options: dict[str, Any]) -> Objective:
    """Build the objective that a manifest names, with the options of the run."""
    # A record may come from somebody else, and must not choose what code runs here.
    for name in own_names(options):
        if not was_loaded(name):
            advice = f"to run it, name it too: --objective {name!r}"
            raise RecordError(f"the run was recorded with {name!r}, code of its own: {advice}")
    try:
        return build_objective(options)
    except (ValueError, LookupError, TypeError) as error:
        raise RecordError(f"the recorded objective cannot be built with this trimtab: {error}") from None


def load_columns(step: RecordedStep, needs: Iterable[str]) -> None:
    """Read all columns that mini-batches and a replay use with one read of the file."""
    wanted = {*COLUMNS, "new_logp", *(OPTIONAL & set(needs))}
    if "segment" in wanted and "segment" not in step.tokens:
        wanted |= {"token", "tool_tokens"}
    step.tokens.load([name for name in step.tokens if name in wanted])


def recorded_mini_batch(update: RecordedUpdate, needs: Iterable[str] = ()) -> RecordedMiniBatch:
    """Read the mini-batch of a recorded update; `needs` names the optional fields that objectives read."""
    step = update.step
    present = [name for name in (*COLUMNS, *sorted(OPTIONAL & set(needs))) if name in step.tokens]
    fields: dict[str, Any] = {name: as_tensor(update.column(name)) for name in present}
    lengths, group, reward = (
        as_tensor(step.responses[name][update.responses]) for name in ("tokens", "group", "reward")
    )
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths.to(torch.int64))
    if "segment" in needs and "segment" not in fields:
        # Runs of methods without segments do not record them, but the tokens are enough.
        spelling = step.records.vocabulary.text_bytes
        token = as_tensor(update.column("token")).long()
        after_tool = as_tensor(update.column("tool_tokens")) > 0 if "tool_tokens" in step.tokens else None
        fields["segment"] = segment_ids(token, spelling, sequence=sequence, after_tool=after_tool)
    if step.rollouts is not None:
        fields["rollout"] = step.rollouts[update.responses]
    try:
        batch = TokenBatch(**fields, sequence=sequence, group=group, reward=reward, responses=len(lengths))
    except ValueError as error:
        raise RecordError(f"step {step.number} of {step.records.folder}: {error}") from None
    if "new_logp" not in step.tokens:
        return RecordedMiniBatch(update, batch, batch.judged_logp)
    new_logp = as_tensor(update.column("new_logp"))
    # An update that was skipped because something was not finite may have NaN here.
    if not update.info.taken:
        new_logp = torch.where(new_logp.isfinite(), new_logp, batch.judged_logp)
    return RecordedMiniBatch(update, batch, new_logp)


def with_advantages_of(batch: TokenBatch, objective: Objective, update: RecordedUpdate) -> TokenBatch:
    """Return the batch with the kind of advantages that the objective is defined with."""
    step = update.step
    if objective.advantage == step.records.manifest.advantage:
        return batch
    if objective.separate_rewards and "rewards" in step.responses and any(step.responses["rewards"]):
        raise RecordError(
            f"{objective.name} normalises each of several rewards by itself, and a record has no weights for them: "
            "replay it on a run with one reward, or leave it out"
        )
    # Over the whole step: a record keeps groups whole, so group statistics are exact even if only a share is recorded.
    reward, group = (as_tensor(step.responses[name]) for name in ("reward", "group"))
    values = objective.advantages(reward, group, step.rollouts)
    return replace(batch, advantage=values[update.responses][batch.sequence])


def replan(objective: Objective, batch: TokenBatch, update: RecordedUpdate) -> list[Plan]:
    """Plan a recorded update again: one plan, or with `scope = "micro"` one for each recorded micro-batch."""
    plan = objective.plan(batch)
    # A plan with `replan` depends on the micro-batches; all others are planned over the whole mini-batch.
    if plan.replan is None:
        return [plan]
    sizes = update.info.micro_batches
    return plan.split(sizes if sum(sizes) == batch.responses else [batch.responses])


def gradient_coefficients(objective: Objective, plans: Sequence[Plan], new_logp: Tensor) -> tuple[Tensor, Tensor]:
    """Return minus d loss / d log-prob of every token, and whether clipping cut it."""
    coefficients = []
    clipped = []
    for plan in plans:
        out, grad_logp = objective.loss_and_grad(new_logp[plan.slice], plan)
        coefficients.append(-grad_logp)
        clipped.append(torch.zeros(plan.tokens, dtype=torch.bool) if out.clipped is None else out.clipped)
    return torch.cat(coefficients), torch.cat(clipped)


def token_effects(objective: Objective, batch: TokenBatch, recorded: RecordedMiniBatch) -> TokenEffects:
    """Plan a recorded mini-batch under an objective; `batch` has the advantages that it is defined with."""
    plans = replan(objective, batch, recorded.update)
    coefficient, clipped = gradient_coefficients(objective, plans, recorded.new_logp)
    planned = ("advantage", "weight", "reason", "clip_low", "clip_high")
    arrays = {name: torch.cat([getattr(plan, name) for plan in plans]).numpy() for name in planned}
    return TokenEffects(coefficient=coefficient.numpy(), clipped=clipped.numpy(), **arrays)


def set_controllers(objective: Objective, step: RecordedStep, recorded: bool) -> None:
    """Set the controllers to their recorded state, or let them observe the rollout's recorded entropy."""
    if recorded:
        try:
            objective.load_state_dict(step.info.controllers)
        except ValueError as error:
            raise RecordError(f"step {step.number} of {step.records.folder}: {error}") from None
        return
    entropy = step.info.observed_entropy
    for controller in objective.controllers.values():
        controller.observe(float("nan") if entropy is None else entropy)


def recorded_threads(step: RecordedStep) -> AbstractContextManager[None]:
    """Use as many threads as the run did, since sums depend on it in the last bit; one for a run on a GPU."""
    return torch_threads(max(step.info.threads, 1) if step.info.device == "cpu" else 1)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Run torch on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def as_tensor(values: NDArray[Any]) -> Tensor:
    """Return a column as a tensor."""
    # torch has no read-only tensors and warns about a read-only array, so such an array is copied.
    return torch.from_numpy(values if values.flags.writeable else values.copy())


@dataclass
class CriticalWeights:
    """STARE's critical weight at recorded steps, beside the weight that was in use; empty for other objectives."""

    steps: list[int] = field(default_factory=list)
    critical: list[float] = field(default_factory=list)
    in_use: list[float] = field(default_factory=list)

    def add(self, step: RecordedStep, recorded: Objective | None, batches: Sequence[RecordedMiniBatch]) -> None:
        """Add a step that was recorded under this objective; `batches` are its mini-batches."""
        gates = recorded.controllers.values() if recorded else ()
        gate = next((gate for gate in gates if isinstance(gate, EntropyGate)), None)
        if recorded is None or gate is None or "sum_p2" not in step.tokens or "sum_p2_logp" not in step.tokens:
            return
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
    """Return the weight on STARE's boosted tokens in an update; 1 if its gate was closed."""
    metrics = replan(recorded, mini_batch.batch, mini_batch.update)[0].metrics
    return float(metrics.get("stare/weight", gate.boost)) if metrics["stare/gate_open"] else 1.0


def _effects(recorded: Objective, mini_batch: RecordedMiniBatch) -> tuple[float, float]:
    """Return the predicted entropy change of an update with weight 1 on STARE's boosted tokens: of all, of these."""
    # Penalties and trim are left out: the one has no weight, the other would hide which tokens STARE boosts.
    rules = tuple(rule for rule in recorded.rules if rule.name != "trim")
    objective = replace(recorded, rules=rules, penalties=())
    batch = mini_batch.batch
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
