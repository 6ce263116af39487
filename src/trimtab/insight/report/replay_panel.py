"""The replay panel of the page: what other objectives would have done, over some of the run's steps."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from trimtab.insight.replay import LEGEND, RECORDED, objective_rows, overlap_row, replay
from trimtab.record import RecordError, Records, RecordWarning

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
    reasons, rows = objective_rows(result)
    # Pairs with the run's own objective; `trimtab replay` prints all.
    pairs = [overlap_row(result, overlap) for overlap in result.overlaps if overlap.first == 0]
    return {
        "steps": len(result.steps),
        "recorded_steps": len(steps),
        "reasons": reasons,
        "rows": [{"name": label, "cells": cells, "entropy": entropy} for label, *cells, entropy in rows],
        "pairs": [{"names": names, "jaccard": value, "agreement": share} for *names, value, share in pairs],
        "legend": LEGEND,
        "notes": list(result.notes),
    }
