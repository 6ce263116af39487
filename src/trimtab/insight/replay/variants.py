"""The objectives of a replay: by name, or the recorded one, with every combination of swept options."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from trimtab.insight.replay.batches import recorded_objective
from trimtab.objectives import Objective, objective, option_names
from trimtab.own_parts import load_part, own_names
from trimtab.record import Records

RECORDED = "recorded"  # the name of the run's own objective

Sweep = Mapping[str, Sequence[Any]]


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
        load_part(own)  # what the user names may be run where the record names it too
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
