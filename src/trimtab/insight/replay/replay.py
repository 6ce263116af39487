"""Replay: what other objectives would have done to the tokens of a recorded run. It needs neither a model nor a GPU.

Every recorded update is planned again under each objective, over the same mini-batch, and its loss taken at the
recorded new log-probabilities. So what it silences, boosts, masks and clips, how much of the gradient that concerns,
and which way it drives the entropy are exact at that point of the run; what the policy would have become is not known.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.insight.replay.batches import (
    as_advantaged,
    load_columns,
    new_log_probs,
    plan_again,
    recorded_objective,
    set_controllers,
    threads_of,
    to_token_batch,
)
from trimtab.insight.replay.values import (
    CLIPPED,
    MARKED,
    Overlap,
    Pull,
    Replay,
    StepReplay,
    Treatment,
    add_overlaps,
    add_treatments,
)
from trimtab.objectives import (
    ATTACHMENTS,
    COMMON_OPTIONS,
    METHODS,
    Objective,
    Plan,
    Reason,
    TokenBatch,
    objective,
    theory,
)
from trimtab.record import RecordedStep, RecordedUpdate, RecordError, Records, RecordWarning, open_run, read_step

RECORDED = "recorded"  # the objective of the run itself, by name
_CLIPPED_BIT = 2 * max(map(int, Reason))  # behind the bits of Reason

Sweep = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Variant:
    """An objective to replay, and what it is called; `recorded` is the run's own, with the run's controllers."""

    label: str
    objective: Objective
    recorded: bool = False


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

    With `every` above 1 only every so many of them: a look at a long run.
    """
    records = open_run(run)
    variants = make_variants(records, objectives, sweep or {})
    steps = []
    for step in replay_steps(records, variants, first, last, every):
        steps.append(step)
        if on_step is not None:
            on_step(step)
    if not steps:
        raise RecordError(f"{run}: none of the steps asked for is recorded (it has {_span(records.steps)})")
    return Replay(
        run=str(run),
        recorded=str(records.manifest.objective.get("name", "")),
        objectives=tuple(variant.label for variant in variants),
        steps=tuple(steps),
        treatments=add_treatments((step.treatments for step in steps), len(variants)),
        overlaps=add_overlaps((step.overlaps for step in steps), len(variants)),
        notes=tuple(_notes(records, variants, steps, every)),
    )


def replay_steps(
    records: Records, variants: Sequence[Variant], first: int | None = None, last: int | None = None, every: int = 1
) -> Iterator[StepReplay]:
    """The same, step by step: no more than one step is in memory."""
    _look_back(records, variants, first)
    needs = frozenset[str]().union(*(variant.objective.needs for variant in variants))
    for step in records.select(first, last, every):
        _check_fields(step, variants)
        load_columns(step, needs)
        for variant in variants:
            set_controllers(variant.objective, step, variant.recorded)
        with threads_of(step):
            updates = [_replay_update(update, variants, needs) for update in step.updates]
        count = len(variants)
        yield StepReplay(
            step.number,
            step.info.tokens,
            step.info.complete,
            "new_logp" in step.tokens,
            step.info.device,
            add_treatments((treatments for treatments, _ in updates), count),
            add_overlaps((overlaps for _, overlaps in updates), count),
        )


def make_variants(records: Records, objectives: Sequence[str], sweep: Sweep) -> list[Variant]:
    """The objectives by name, `recorded` among them, each with every combination of the swept options it has."""
    options = records.manifest.objective
    variants: dict[str, Variant] = {}
    used: set[str] = set()
    for name in objectives:
        written = str(options["name"]) if name == RECORDED else name
        mine = {key: values for key, values in sweep.items() if has_option(written, key)}
        used |= set(mine)
        for values in product(*mine.values()):
            chosen = dict(zip(mine, values, strict=True))
            label = " ".join([name, *(f"{key}={value}" for key, value in chosen.items())])
            if name == RECORDED:
                built = recorded_objective({**options, **chosen})
                variants[label] = Variant(f"{label} ({written})", built, not chosen)
            else:
                variants[label] = Variant(label, objective(name, **chosen))
    unused = sorted(set(sweep) - used)
    if unused:
        raise ValueError(f"--sweep {unused[0]}: none of {', '.join(objectives)} has an option of that name")
    return list(variants.values())


def has_option(name: str, option: str) -> bool:
    """Whether an objective, or what is attached to it, has an option."""
    parts = [re.split(r"\(", term)[0].strip() for term in re.sub(r"\([^)]*\)", "", name).split("+")]
    known = {**ATTACHMENTS, **METHODS}
    return option in COMMON_OPTIONS or any(option in known[part].options for part in parts if part in known)


def parse_sweep(settings: Sequence[str]) -> dict[str, list[Any]]:
    """`tau_p=0.0005,0.002` as values: numbers and true or false where they look like it, else words."""
    sweep: dict[str, list[Any]] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        words = [word.strip() for word in text.split(",")]
        if not equals or not key.strip().isidentifier() or not all(words):
            raise ValueError(f"--sweep {setting!r}: write option=value,value, for example tau_p=0.0005,0.002")
        sweep[key.strip()] = [_value(word) for word in words]
    return sweep


def _value(word: str) -> Any:
    try:
        value = json.loads(word)
    except json.JSONDecodeError:
        return word
    return value if isinstance(value, int | float | bool) else word


def _replay_update(
    update: RecordedUpdate, variants: Sequence[Variant], needs: frozenset[str]
) -> tuple[tuple[Treatment, ...], tuple[Overlap, ...]]:
    batch = to_token_batch(update, needs)
    new_logp = new_log_probs(update, batch)
    norm, drive = _norms(batch)
    treatments, codes = [], []
    for variant in variants:
        mine = as_advantaged(batch, variant.objective, update)
        plans = plan_again(variant.objective, mine, update)
        coefficient, code = _pull(variant.objective, plans, new_logp)
        before = (mine.advantage.abs() * norm).numpy() / max(batch.tokens, 1)
        after = (coefficient.abs() * norm).numpy()
        change = -float((coefficient * drive).sum(dtype=torch.float64))
        treatments.append(_treatment(code, before, after, change))
        codes.append(_apart(code))
    return tuple(treatments), tuple(_overlaps(codes))


def _norms(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Per token, the norm of the gradient of its log-probability and what it drives the entropy by; NaN if unknown."""
    if batch.entropy is None or batch.sum_p2 is None or batch.sum_p2_logp is None:
        unknown = torch.full_like(batch.old_logp, torch.nan)
        return unknown, unknown
    return theory.gradient_norm_squared(batch.judged_logp, batch.sum_p2).sqrt(), theory.batch_phi(batch)


def _pull(objective: Objective, plans: Sequence[Plan], new_logp: Tensor) -> tuple[Tensor, np.ndarray[Any, Any]]:
    """Per token, the coefficient of its log-probability, and its reasons with the clip as one more bit."""
    coefficients, codes = [], []
    for plan in plans:
        out, grad_logp = objective.loss_and_grad(new_logp[plan.slice], plan)
        coefficients.append(-grad_logp)
        code = plan.reason.numpy()
        codes.append(code if out.clipped is None else code | (out.clipped.numpy() * np.int16(_CLIPPED_BIT)))
    return torch.cat(coefficients), np.concatenate(codes)


def _treatment(
    code: np.ndarray[Any, Any], before: np.ndarray[Any, Any], after: np.ndarray[Any, Any], change: float
) -> Treatment:
    """Sums by reason: first over each combination of reasons, of which there are few."""
    counts = np.bincount(code)
    sums = np.bincount(code, before), np.bincount(code, after)
    found = {int(n): Pull(int(counts[n]), float(sums[0][n]), float(sums[1][n])) for n in counts.nonzero()[0]}
    bits = {_name(reason): int(reason) for reason in Reason if reason} | {CLIPPED: _CLIPPED_BIT}
    by_reason = {name: [pull for n, pull in found.items() if n & bit] for name, bit in bits.items()}
    return Treatment(
        updates=1,
        tokens=len(code),
        touched=sum(pull.tokens for n, pull in found.items() if n & _SET_APART),
        total=sum(found.values(), Pull()),
        entropy_change=change,
        reasons={name: sum(pulls, Pull()) for name, pulls in by_reason.items() if pulls},
    )


_SET_APART = int(MARKED) | _CLIPPED_BIT


def _apart(code: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What sets each token apart; 0 for those that are treated as they came."""
    return code & np.int16(_SET_APART)


def _overlaps(codes: Sequence[np.ndarray[Any, Any]]) -> Iterator[Overlap]:
    touched = [code != 0 for code in codes]
    counts = [int(np.count_nonzero(mask)) for mask in touched]
    for second in range(len(codes)):
        for first in range(second):
            both = int(np.count_nonzero(touched[first] & touched[second]))
            agreed = int(np.count_nonzero((codes[first] == codes[second]) & touched[first])) if both else 0
            yield Overlap(first, second, both, counts[first] + counts[second] - both, agreed)


def _name(reason: Reason) -> str:
    return str(reason.name).lower()


def _look_back(records: Records, variants: Sequence[Variant], first: int | None) -> None:
    """Let controllers see the steps before the first one replayed, for some remember more than the last."""
    watching = [variant for variant in variants if variant.objective.controllers and not variant.recorded]
    for number in records.steps if watching and first is not None else []:
        if number >= first:  # type: ignore[operator]
            return
        try:
            info, files = read_step(records.folder, number)
        except RecordError as error:
            warnings.warn(f"{error}; step {number} is left out", RecordWarning, stacklevel=2)
            continue
        for variant in watching:
            set_controllers(variant.objective, RecordedStep(records, info, files), False)


def _check_fields(step: RecordedStep, variants: Sequence[Variant]) -> None:
    """Every objective's fields are there; segments can be made."""
    for variant in variants:
        missing = sorted(variant.objective.needs - set(step.tokens) - {"segment"})
        if missing:
            raise RecordError(
                f"{variant.label} reads `{missing[0]}`, which step {step.number} of {step.records.folder} lacks: leave "
                "that objective out, or record a run whose recipe measures it"
            )


def _notes(records: Records, variants: Sequence[Variant], steps: Sequence[StepReplay], every: int) -> Iterator[str]:
    manifest = records.manifest
    partial = sum(not step.exact for step in steps)
    if partial:
        yield (
            f"{partial} of {len(steps)} steps were planned over the recorded share of the mini-batch "
            f"(record.group_share = {manifest.settings.group_share:g}): quantiles and normalisers are of that share"
        )
    if not all(step.moved for step in steps):
        yield "no new log-probabilities were recorded: ratios are taken as 1, and nothing is clipped"
    if any(step.device != "cpu" for step in steps):
        yield "recorded on a GPU: thresholds made from sums may differ here in the last bit"
    apart = manifest.settings.every * manifest.stride * every
    if apart > 1 and any(variant.objective.controllers and not variant.recorded for variant in variants):
        yield f"one step in {apart} is {'replayed' if every > 1 else 'recorded'}: an adaptive gate saw only those"


def _span(steps: Sequence[int]) -> str:
    return f"{steps[0]} to {steps[-1]}" if steps else "no steps"
