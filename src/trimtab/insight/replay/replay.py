"""Replay: what other objectives would have done to the tokens of a recorded run. It needs neither a model nor a GPU.

Every recorded update is planned again under each objective, over the same mini-batch, and its loss is taken at the
recorded new log-probabilities. So what it silences, boosts, masks and clips, the gradient mass of these tokens, and the
predicted entropy change are exact at that point of the run; how the policy would have developed is not known.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab.insight.replay.batches import (
    gradient_coefficients,
    load_columns,
    recorded_mini_batch,
    recorded_threads,
    replan,
    set_controllers,
    with_advantages_of,
)
from trimtab.insight.replay.stats import (
    CLIPPED,
    TOUCHING_REASONS,
    GradientMass,
    ObjectiveStats,
    Overlaps,
    Replay,
    Stats,
    StepReplay,
    TokenOverlap,
    add_up,
)
from trimtab.insight.replay.variants import RECORDED, ReplayVariant, Sweep, make_variants
from trimtab.objectives import Reason, TokenBatch, theory
from trimtab.record import RecordedStep, RecordedUpdate, RecordError, Records, RecordWarning, open_run, read_step

_CLIPPED_BIT = 2 * max(map(int, Reason))  # one above the bits of Reason
_TOUCHED_BITS = np.int16(int(TOUCHING_REASONS) | _CLIPPED_BIT)
_REASON_BITS = {str(reason.name).lower(): int(reason) for reason in Reason if reason} | {CLIPPED: _CLIPPED_BIT}


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
    variants = make_variants(records, objectives, sweep or {})
    steps = []
    for step in replay_steps(records, variants, first, last, every):
        steps.append(step)
        if on_step is not None:
            on_step(step)
    if not steps:
        recorded = f"{records.steps[0]} to {records.steps[-1]}" if records.steps else "no steps"
        raise RecordError(f"{run}: none of the steps asked for is recorded (it has {recorded})")
    stats, overlaps = add_up(((step.stats, step.overlaps) for step in steps), len(variants))
    return Replay(
        run=str(run),
        recorded=str(records.manifest.objective.get("name", "")),
        objectives=tuple(variant.label for variant in variants),
        steps=tuple(steps),
        stats=stats,
        overlaps=overlaps,
        notes=tuple(_notes(records, variants, steps)),
    )


def replay_steps(
    records: Records,
    variants: Sequence[ReplayVariant],
    first: int | None = None,
    last: int | None = None,
    every: int = 1,
) -> Iterator[StepReplay]:
    """Replay step by step, with no more than one step in memory."""
    needs = frozenset[str]().union(*(variant.objective.needs for variant in variants))
    seen = 0
    for step in records.select(first, last, every):
        _warm_up_controllers(records, variants, seen, step.number)
        seen = step.number
        _check_fields(step, variants)  # before the columns are read: the error names the objective
        load_columns(step, needs)
        for variant in variants:
            set_controllers(variant.objective, step, variant.recorded)
        with recorded_threads(step):
            updates = [_replay_update(update, variants, needs) for update in step.updates]
        info, sums = step.info, add_up(updates, len(variants))
        yield StepReplay(info.step, info.tokens, info.complete, "new_logp" in step.tokens, info.device, *sums)


def _replay_update(
    update: RecordedUpdate, variants: Sequence[ReplayVariant], needs: frozenset[str]
) -> tuple[Stats, Overlaps]:
    recorded = recorded_mini_batch(update, needs)
    grad_norm, phi = _gradient_norm_and_phi(recorded.batch)
    stats, touched = [], []
    for variant in variants:
        batch = with_advantages_of(recorded.batch, variant.objective, update)
        plans = replan(variant.objective, batch, update)
        coefficient, clipped = gradient_coefficients(variant.objective, plans, recorded.new_logp)
        code = np.concatenate([plan.reason.numpy() for plan in plans]) | (clipped.numpy() * np.int16(_CLIPPED_BIT))
        # Divided by the tokens, as a token-mean loss does; the objective's own scale is in the coefficient.
        before = (batch.advantage.abs() * grad_norm).numpy() / max(batch.tokens, 1)
        after = (coefficient.abs() * grad_norm).numpy()
        # In float64: the terms cancel, and there may be a million of them.
        change = -float((coefficient * phi).sum(dtype=torch.float64))
        weight = np.concatenate([plan.weight.numpy() for plan in plans])
        stats.append(_update_stats(code, (before, after, weight), change))
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
        missing = sorted(variant.objective.needs - set(step.tokens) - {"segment"})
        if missing:
            raise RecordError(
                f"{variant.label} reads `{missing[0]}`, which step {step.number} of {step.records.folder} lacks: leave "
                "that objective out, or record a run whose recipe measures it"
            )


def _notes(records: Records, variants: Sequence[ReplayVariant], steps: Sequence[StepReplay]) -> Iterator[str]:
    manifest = records.manifest
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
