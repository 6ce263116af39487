"""The replay panel of the page: what other objectives would have done, over some of the run's steps."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from trimtab.insight.replay import LEGEND, RECORDED, entropy_cell, jaccard_cell, reason_cell, replay, shown_reasons
from trimtab.record import RecordError, Records, RecordWarning
from trimtab.text import percent

MOST_STEPS = 60  # evenly spaced; `trimtab replay` goes through all of them


def replay_json(records: Records, names: Sequence[str], notes: list[str]) -> dict[str, Any] | None:
    """Return the tables of `trimtab replay` as text; None and a note if the records cannot be replayed."""
    steps = records.steps
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordWarning)  # damaged steps are already among the notes of the page
        try:
            result = replay(records.folder.parent, [RECORDED, *names], every=-(-len(steps) // MOST_STEPS))
        except (RecordError, ValueError, LookupError, TypeError) as error:
            notes.append(f"no replay: {error}")
            return None
    reasons = shown_reasons(result)
    return {
        "steps": len(result.steps),
        "recorded_steps": len(steps),
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
            if overlap.first == 0  # pairs with the run's own objective; `trimtab replay` prints all
        ],
        "legend": LEGEND,
        "notes": list(result.notes),
    }
