"""What other objectives would have done to the run, for the page: a replay of some of its steps."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from trimtab.insight.replay import LEGEND, RECORDED, entropy_cell, jaccard_cell, reason_cell, replay, shown_reasons
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
            {"name": label, "cells": [reason_cell(stats, reason) for reason in reasons], "entropy": entropy_cell(stats)}
            for label, stats in zip(result.objectives, result.stats, strict=True)
        ],
        "pairs": [
            {
                "names": [result.objectives[overlap.first], result.objectives[overlap.second]],
                "jaccard": jaccard_cell(overlap.jaccard),
                "agreement": percent(overlap.agreement),
            }
            for overlap in result.overlaps
            if overlap.first == 0  # beside the run's own; `trimtab replay` has all pairs
        ],
        "legend": LEGEND,
        "notes": list(result.notes),
    }
