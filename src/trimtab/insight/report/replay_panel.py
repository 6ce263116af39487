"""What other objectives would have done to the run, for the page: a replay of some of its steps."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from trimtab.insight.replay.replay import RECORDED, replay
from trimtab.insight.replay.table import LEGEND, cell, change, number, shown_reasons
from trimtab.record import RecordError, Records, RecordWarning
from trimtab.text import percent

MOST_STEPS = 60  # evenly spaced; `trimtab replay` goes through all of them


def pack_replay(records: Records, names: Sequence[str], notes: list[str]) -> dict[str, Any] | None:
    """The tables of `trimtab replay`, in words; None, and a note, where the records do not allow it."""
    steps = records.steps
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordWarning)  # damaged steps are named elsewhere on the page
        try:
            result = replay(records.folder.parent, [RECORDED, *names], every=-(-len(steps) // MOST_STEPS))
        except (RecordError, ValueError, LookupError, TypeError) as error:
            notes.append(f"no replay: {error}")
            return None
    reasons = shown_reasons(result)
    return {
        "steps": len(result.steps),
        "of": len(steps),
        "reasons": reasons,
        "rows": [
            {"name": label, "cells": [cell(treatment, reason) for reason in reasons], "entropy": change(treatment)}
            for label, treatment in zip(result.objectives, result.treatments, strict=True)
        ],
        "pairs": [
            {
                "names": [result.objectives[overlap.first], result.objectives[overlap.second]],
                "jaccard": number(overlap.jaccard),
                "agreement": percent(overlap.agreement),
            }
            for overlap in result.overlaps
            if overlap.first == 0  # beside the run's own; `trimtab replay` has all pairs
        ],
        "legend": LEGEND,
        "notes": list(result.notes),
    }
