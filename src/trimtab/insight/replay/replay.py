"""Replay: what other objectives would have done to the tokens of a recorded run. It needs neither a model nor a GPU.

Every recorded update is planned again under each objective, over the same mini-batch, and its loss is taken at the
recorded new log-probabilities. So what it silences, boosts, masks and clips, the gradient mass of these tokens, and the
predicted entropy change are exact at that point of the run; how the policy would have developed is not known.
"""

from __future__ import annotations

import json
import math
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab.insight.replay.batches import (
    as_tensor,
    load_columns,
    recorded_mini_batch,
    recorded_objective,
    recorded_threads,
    set_controllers,
    token_effects,
    with_advantages_of,
)
from trimtab.objectives import Objective, Reason, TokenBatch, objective, option_names, theory
from trimtab.own_parts import load_part, own_names
from trimtab.record import RecordedStep, RecordedUpdate, RecordError, Records, RecordWarning, open_run, read_step

RECORDED = "recorded"  # the name of the run's own objective
CLIPPED = "clipped"
# Reasons for which a token counts as touched; the others (no signal, corrected, widened, narrowed) hold for most.
TOUCHING_REASONS = Reason.SILENCED | Reason.BOOSTED | Reason.DAMPED | Reason.MASKED | Reason.DROPPED
TOUCHING_REASONS |= Reason.PENALIZED | Reason.RESHAPED
_CLIPPED_BIT = 2 * max(map(int, Reason))  # one above the bits of Reason
_TOUCHED_BITS = np.int16(int(TOUCHING_REASONS) | _CLIPPED_BIT)
_REASON_BITS = {str(reason.name).lower(): int(reason) for reason in Reason if reason} | {CLIPPED: _CLIPPED_BIT}

Sweep = Mapping[str, Sequence[Any]]


@dataclass(frozen=True, slots=True)
class GradientMass:
    """A number of tokens, their gradient mass before and after the objective's rules, and the sum of their weights.

    A token's mass is the exact norm of its gradient in the logits: `|A| |1[k] - p|` before, with the objective's own
    coefficient in place of `A` after. Sums are per token of an update, added over updates.
    """

    tokens: int = 0
    before: float = 0.0
    after: float = 0.0
    weight: float = 0.0

    def __add__(self, other: GradientMass) -> GradientMass:
        masses = self.before + other.before, self.after + other.after
        return GradientMass(self.tokens + other.tokens, *masses, self.weight + other.weight)


@dataclass(frozen=True, slots=True)
class ObjectiveStats:
    """What an objective does to the tokens of an update, a step or a run.

    `reasons` has an entry for each reason that occurs, and for `clipped`; a token can have several. `touched` are the
    tokens that are clipped, silenced, boosted, damped, masked, dropped, penalized or reshaped.
    `entropy_change` is the predicted first-order change of the entropy per unit of step size, added over `updates`.
    """

    updates: int = 0
    tokens: int = 0
    touched: int = 0
    total: GradientMass = GradientMass()
    entropy_change: float = 0.0
    reasons: dict[str, GradientMass] = field(default_factory=dict)

    def __add__(self, other: ObjectiveStats) -> ObjectiveStats:
        # A reason may occur in one of the two only.
        names = {**self.reasons, **other.reasons}
        none = GradientMass()
        return ObjectiveStats(
            self.updates + other.updates,
            self.tokens + other.tokens,
            self.touched + other.touched,
            self.total + other.total,
            self.entropy_change + other.entropy_change,
            {name: self.reasons.get(name, none) + other.reasons.get(name, none) for name in names},
        )

    def share(self, reason: str) -> float:
        """Return the share of tokens with a reason."""
        return _ratio(self.reasons.get(reason, GradientMass()).tokens, self.tokens)

    def mass(self, reason: str) -> float:
        """Return the share of the gradient mass, before the objective's rules, of tokens with a reason."""
        return _ratio(self.reasons.get(reason, GradientMass()).before, self.total.before)

    def mass_after(self, reason: str) -> float:
        """Return the same share after the objective's rules."""
        return _ratio(self.reasons.get(reason, GradientMass()).after, self.total.after)

    def weight(self, reason: str) -> float:
        """Return the mean weight of the tokens with a reason."""
        found = self.reasons.get(reason, GradientMass())
        return _ratio(found.weight, found.tokens)

    @property
    def entropy_change_per_update(self) -> float:
        """Return the predicted entropy change, mean over updates."""
        return _ratio(self.entropy_change, self.updates)


@dataclass(frozen=True, slots=True)
class TokenOverlap:
    """How many tokens two objectives (by index) both touch, either touches, and both touch for the same reasons."""

    first: int
    second: int
    both: int = 0
    either: int = 0
    agreed: int = 0

    def __add__(self, other: TokenOverlap) -> TokenOverlap:
        counts = self.both + other.both, self.either + other.either, self.agreed + other.agreed
        return TokenOverlap(self.first, self.second, *counts)

    @property
    def jaccard(self) -> float:
        """Return tokens touched by both over tokens touched by either; NaN if neither touches any."""
        return _ratio(self.both, self.either)

    @property
    def agreement(self) -> float:
        """Return, of the tokens that both touch, the share with the same reasons."""
        return _ratio(self.agreed, self.both)


Stats = tuple[ObjectiveStats, ...]  # of each objective
Overlaps = tuple[TokenOverlap, ...]  # of each pair


@dataclass(frozen=True, slots=True)
class StepReplay:
    """A step: the stats of each objective, and the overlap of each pair.

    `exact` if all of the step is recorded; `has_new_logp` if the updates' own log-probabilities are, without which
    nothing is known to be clipped; `device` is that of the run.
    """

    step: int
    tokens: int
    exact: bool
    has_new_logp: bool
    device: str
    stats: Stats
    overlaps: Overlaps


@dataclass(frozen=True, slots=True)
class Replay:
    """A run under several objectives, step by step and in sum; `notes` name the limits of what was recorded."""

    run: str
    recorded: str
    objectives: tuple[str, ...]
    steps: tuple[StepReplay, ...]
    stats: Stats
    overlaps: Overlaps
    notes: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Return whether every plan is the one that the objective would have made in the run."""
        return all(step.exact for step in self.steps)


def add_up(rows: Iterable[tuple[Stats, Overlaps]], count: int) -> tuple[Stats, Overlaps]:
    """Add up the stats of `count` objectives and the overlaps of their pairs over updates or steps."""
    # From zeros, so that a step without updates has stats too.
    stats: Stats = (ObjectiveStats(),) * count
    overlaps: Overlaps = tuple(TokenOverlap(first, second) for second in range(count) for first in range(second))
    for more_stats, more_overlaps in rows:
        stats = tuple(a + b for a, b in zip(stats, more_stats, strict=True))
        overlaps = tuple(a + b for a, b in zip(overlaps, more_overlaps, strict=True))
    return stats, overlaps


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


@dataclass(frozen=True)
class ReplayVariant:
    """An objective to replay and its label; `recorded` is the run's own, with the recorded controller states."""

    label: str
    objective: Objective
    recorded: bool = False


def make_variants(records: Records, objectives: Sequence[str], sweep: Sweep) -> list[ReplayVariant]:
    """Build the named objectives, each with every combination of the swept options that it has."""
    options = records.manifest.objective
    variants: dict[str, ReplayVariant] = {}  # by label: an objective that is named twice is replayed once
    used: set[str] = set()
    for own in own_names(list(objectives)):
        load_part(own)  # what the user names may be run if the record names it too
    for name in objectives:
        method = str(options["name"]) if name == RECORDED else name
        swept = {key: values for key, values in sweep.items() if key in option_names(method)}
        used |= set(swept)
        for values in product(*swept.values()):
            chosen = dict(zip(swept, values, strict=True))
            label = " ".join([name, *(f"{key}={value}" for key, value in chosen.items())])
            if name == RECORDED:
                # With a swept option it is another objective, whose controllers have no recorded state.
                built = recorded_objective({**options, **chosen})
                variants[label] = ReplayVariant(f"{label} ({method})", built, not chosen)
            else:
                variants[label] = ReplayVariant(label, objective(name, **chosen))
    unused = sorted(set(sweep) - used)
    if unused:
        raise ValueError(f"--sweep {unused[0]}: none of {', '.join(objectives)} has an option of that name")
    return list(variants.values())


def parse_sweep(settings: Sequence[str]) -> dict[str, list[Any]]:
    """Parse `tau_p=0.0005,0.002` into numbers, true or false, or text."""
    sweep: dict[str, list[Any]] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        values = [value.strip() for value in text.split(",")]
        if not equals or not key.strip().isidentifier() or not all(values):
            raise ValueError(f"--sweep {setting!r}: write option=value,value, for example tau_p=0.0005,0.002")
        sweep[key.strip()] = [_parse_value(value) for value in values]
    return sweep


def _parse_value(text: str) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    return value if isinstance(value, int | float | bool) else text


def replay(
    run: str | Path,
    objectives: Sequence[str] = (RECORDED,),
    *,
    sweep: Sweep | None = None,
    first: int | None = None,
    last: int | None = None,
    every: int = 1,
    on_step: Callable[[StepReplay], None] | None = None,
) -> Replay:
    """Replay the recorded steps from `first` to `last` under each objective, and with each value that is swept.

    With `every` above 1 only one in so many recorded steps is replayed.
    """
    records = open_run(run)
    replayer = Replayer(records, make_variants(records, objectives, sweep or {}))
    for step in records.select(first, last, every):
        replayed = replayer.add(step)
        if on_step is not None:
            on_step(replayed)
    return replayer.result(str(run))


@dataclass
class Replayer:
    """Replays the steps that are added, in their order, under each variant."""

    records: Records
    variants: Sequence[ReplayVariant]
    steps: list[StepReplay] = field(default_factory=list)
    branches: int = 0  # responses of the steps that are branches of an agent's rollouts
    rollouts: int = 0  # these

    def add(self, step: RecordedStep) -> StepReplay:
        """Replay a step."""
        variants = self.variants
        needs = frozenset[str]().union(*(variant.objective.needs for variant in variants))
        _warm_up_controllers(self.records, variants, self.steps[-1].step if self.steps else 0, step.number)
        _check_fields(step, variants)  # before the columns are read: the error names the objective
        load_columns(step, needs)
        for variant in variants:
            set_controllers(variant.objective, step, variant.recorded)
        with recorded_threads(step):
            updates = [_replay_update(update, variants, needs) for update in step.updates]
        info = step.info
        sums = add_up(updates, len(variants))
        replayed = StepReplay(info.step, info.tokens, info.complete, "new_logp" in step.tokens, info.device, *sums)
        self.steps.append(replayed)
        if step.rollouts is not None:
            self.branches += info.responses
            self.rollouts += len(set(step.rollouts))
        return replayed

    def result(self, run: str) -> Replay:
        """Return the steps in sum; `run` is named in it."""
        if not self.steps:
            steps = self.records.steps
            recorded = f"{steps[0]} to {steps[-1]}" if steps else "no steps"
            raise RecordError(f"{run}: none of the steps asked for is recorded (it has {recorded})")
        stats, overlaps = add_up(((step.stats, step.overlaps) for step in self.steps), len(self.variants))
        return Replay(
            run=run,
            recorded=str(self.records.manifest.objective.get("name", "")),
            objectives=tuple(variant.label for variant in self.variants),
            steps=tuple(self.steps),
            stats=stats,
            overlaps=overlaps,
            notes=tuple(_notes(self)),
        )


def _replay_update(
    update: RecordedUpdate, variants: Sequence[ReplayVariant], needs: frozenset[str]
) -> tuple[Stats, Overlaps]:
    recorded = recorded_mini_batch(update, needs)
    grad_norm, phi = _gradient_norm_and_phi(recorded.batch)
    stats = []
    touched = []
    for variant in variants:
        batch = with_advantages_of(recorded.batch, variant.objective, update)
        effects = token_effects(variant.objective, batch, recorded)
        code = effects.reason | (effects.clipped * np.int16(_CLIPPED_BIT))
        # Divided by the tokens, as a token-mean loss does; the objective's own scale is in the coefficient.
        before = (batch.advantage.abs() * grad_norm).numpy() / max(batch.tokens, 1)
        after = np.abs(effects.coefficient) * grad_norm.numpy()
        # In float64: the terms cancel, and there may be a million of them.
        change = -float((as_tensor(effects.coefficient) * phi).sum(dtype=torch.float64))
        stats.append(_update_stats(code, (before, after, effects.weight), change))
        touched.append(code & _TOUCHED_BITS)
    return tuple(stats), tuple(_overlaps(touched))


def _gradient_norm_and_phi(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Return per token the norm of d log-prob / d logits, and STARE's Phi; NaN if the moments are not recorded."""
    if batch.entropy is None or batch.sum_p2 is None or batch.sum_p2_logp is None:
        unknown = torch.full_like(batch.old_logp, torch.nan)
        return unknown, unknown
    return theory.gradient_norm_squared(batch.judged_logp, batch.sum_p2).sqrt(), theory.batch_phi(batch)


def _update_stats(code: NDArray[Any], values: Sequence[NDArray[Any]], change: float) -> ObjectiveStats:
    """Return the stats of an update from each token's reasons and (mass before, mass after, weight)."""
    # Summed over each combination of reasons first: one bincount instead of a mask for each reason.
    counts = np.bincount(code)
    sums = [np.bincount(code, column) for column in values]
    masses = {int(n): GradientMass(int(counts[n]), *(float(each[n]) for each in sums)) for n in counts.nonzero()[0]}
    by_reason = {name: [mass for n, mass in masses.items() if n & bit] for name, bit in _REASON_BITS.items()}
    return ObjectiveStats(
        updates=1,
        tokens=len(code),
        touched=sum(mass.tokens for n, mass in masses.items() if n & _TOUCHED_BITS),
        total=sum(masses.values(), GradientMass()),
        entropy_change=change,
        reasons={name: sum(found, GradientMass()) for name, found in by_reason.items() if found},
    )


def _overlaps(codes: Sequence[NDArray[Any]]) -> Iterator[TokenOverlap]:
    touched = [code != 0 for code in codes]
    counts = [int(np.count_nonzero(mask)) for mask in touched]
    for second in range(len(codes)):
        for first in range(second):
            both = int(np.count_nonzero(touched[first] & touched[second]))
            # Codes hold all touching reasons, so equal codes mean the same reasons.
            agreed = int(np.count_nonzero((codes[first] == codes[second]) & touched[first])) if both else 0
            yield TokenOverlap(first, second, both, counts[first] + counts[second] - both, agreed)


def _warm_up_controllers(records: Records, variants: Sequence[ReplayVariant], after: int, before: int) -> None:
    """Let controllers observe the steps between two that are replayed, since some depend on more than the last step."""
    adaptive = [variant for variant in variants if variant.objective.controllers and not variant.recorded]
    between = records.steps[bisect_right(records.steps, after) : bisect_left(records.steps, before)]
    for number in between if adaptive else ():
        try:
            info, files = read_step(records.folder, number)
        except RecordError as error:
            warnings.warn(f"{error}; step {number} is left out", RecordWarning, stacklevel=2)
            continue
        for variant in adaptive:
            set_controllers(variant.objective, RecordedStep(records, info, files), False)


def _check_fields(step: RecordedStep, variants: Sequence[ReplayVariant]) -> None:
    """Raise if a field that an objective needs is not recorded; segments can be computed from the tokens."""
    for variant in variants:
        # The group is a column of responses.
        missing = sorted(variant.objective.needs - set(step.tokens) - {"segment", "group"})
        if missing:
            raise RecordError(
                f"{variant.label} reads `{missing[0]}`, which step {step.number} of {step.records.folder} lacks: leave "
                "that objective out, or record a run whose recipe measures it"
            )


def _notes(replayer: Replayer) -> Iterator[str]:
    manifest, variants, steps = replayer.records.manifest, replayer.variants, replayer.steps
    if replayer.rollouts:
        yield (
            f"{replayer.branches} responses are branches of {replayer.rollouts} rollouts: advantages and means over "
            "responses are over rollouts"
        )
    partial = sum(not step.exact for step in steps)
    if partial:
        yield (
            f"{partial} of {len(steps)} steps were planned over the recorded share of the mini-batch "
            f"(record.group_share = {manifest.settings.group_share:g}): quantiles and normalisers are of that share"
        )
    if not all(step.has_new_logp for step in steps):
        yield "no new log-probabilities were recorded: ratios are taken as 1, and nothing is clipped"
    # CUDA adds floats in another order than the CPU.
    if any(step.device != "cpu" for step in steps):
        yield "recorded on a GPU: thresholds made from sums may differ here in the last bit"
    # `stride` grows whenever records are thinned out to stay within their size limit.
    interval = manifest.settings.every * manifest.stride
    if interval > 1 and any(variant.objective.controllers and not variant.recorded for variant in variants):
        yield f"one step in {interval} is recorded: an adaptive gate saw only those"
