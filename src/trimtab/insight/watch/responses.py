"""The recorded responses of a run as a table: filtered, sorted, and exported as JSON lines.

Steps are read from the newest backwards. One request reads so many of them at most and says where the next one can go
on: a run may have recorded gigabytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.insight.report.embed import truncated
from trimtab.insight.watch.watched_run import WatchedRun
from trimtab.record import RecordedStep, RecordError
from trimtab.text import shown

MOST_ROWS = 200  # of an answer
STEPS_AT_ONCE = 150  # that one request reads, at most
BYTES_AT_ONCE = 96_000_000  # of their files
SHOWN_TEXT, SHOWN_PROMPT = 1_500, 600  # characters of a response in the table, and of its prompt
SIDE_BY_SIDE, GROUPS = 4, 2  # responses of each group that are shown of the newest step
SHOWN_SAMPLE = 2_500
SORTS = {
    "newest": lambda row: (-row["step"], row["response"]),
    "oldest": lambda row: (row["step"], row["response"]),
    "reward": lambda row: -row["reward"],
    "lowest": lambda row: row["reward"],
    "longest": lambda row: -row["length"],
    "shortest": lambda row: row["length"],
    "failed": lambda row: -row.get("failed_calls", 0),
}
NUMBERS = ("first", "last", "min_reward", "max_reward", "min_length", "max_length", "before", "limit")
TEXTS = ("verdict", "outcome", "text", "sort")


@dataclass(frozen=True)
class ResponseFilter:
    """What the table shows; None and "" let everything pass. `before` goes on below a step."""

    first: float | None = None
    last: float | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_length: float | None = None
    max_length: float | None = None
    before: float | None = None
    limit: float | None = None
    verdict: str = ""
    outcome: str = ""
    text: str = ""
    sort: str = "newest"


def parse_filter(query: Mapping[str, str]) -> ResponseFilter:
    """Return the filter of a request; ValueError names what it cannot be."""
    values: dict[str, Any] = {}
    for name, value in query.items():
        if name in TEXTS:
            values[name] = value[:1_000]
        elif name in NUMBERS:
            if not value:
                continue
            try:
                values[name] = float(value[:40])
            except ValueError:
                raise ValueError(f"{name} is {shown(value)}; it must be a number") from None
        else:
            raise ValueError(f"{shown(name)} is no filter; there are {', '.join((*NUMBERS, *TEXTS))}")
    if values.get("sort", "newest") not in SORTS:
        raise ValueError(f"sort is {shown(values['sort'])}; it must be one of {', '.join(SORTS)}")
    return ResponseFilter(**values)


def response_table(run: WatchedRun, wanted: ResponseFilter) -> dict[str, Any]:
    """Return the rows that pass in the newest steps, which steps were read, and where to go on."""
    rows: list[dict[str, Any]] = []
    read: list[int] = []
    size = 0
    notes: list[str] = []
    verdicts: set[str] = set()
    outcomes: set[str] = set()
    numbers = [number for number in reversed(run.steps) if _step_passes(number, wanted)]
    most = MOST_ROWS if wanted.limit is None else int(max(1, min(wanted.limit, MOST_ROWS)))
    enough = most if wanted.sort == "newest" else 10 * most
    for number in numbers[:STEPS_AT_ONCE]:
        try:
            step = open_step(run, number)
            found = [row for row in _rows(step, wanted) if row is not None]
            # The whole step's, so that one can be chosen that the filter now hides.
            verdicts |= {truncated(str(kind), 60) for kind in set(step.responses["verdict"])}
            outcomes |= {name for row in found for name in row.get("outcomes", ())}
        except (RecordError, LookupError) as error:
            notes.append(f"step {number} is left out: {truncated(str(error), 300)}")
            found = []
        else:
            size += step.tokens.size + step.responses.size
        rows += found
        read.append(number)
        if len(rows) >= enough or size > BYTES_AT_ONCE:
            break
    rows.sort(key=SORTS[wanted.sort])
    return {
        # Whole steps in the order of reading, or those after the last one shown would be skipped by the next request.
        "rows": rows if wanted.sort == "newest" else rows[:most],
        "found": len(rows),
        "read": [read[-1], read[0], len(read)] if read else None,
        "recorded": len(run.steps),
        "before": read[-1] if len(read) < len(numbers) else None,
        "verdicts": sorted(verdicts),
        "outcomes": sorted(outcomes),
        "notes": notes[:5],
    }


def export_lines(run: WatchedRun, wanted: ResponseFilter) -> Iterator[str]:
    """Yield a JSON line for every response that passes, from the first step on, with all of its text."""
    for number in [number for number in run.steps if _step_passes(number, wanted)]:
        try:
            step = open_step(run, number)
            for row in _rows(step, wanted, whole=True):
                yield json.dumps(row, ensure_ascii=True) + "\n"
        except (RecordError, LookupError) as error:
            yield json.dumps({"step": number, "error": str(error)[:500]}) + "\n"


def newest_samples(run: WatchedRun) -> dict[str, Any]:
    """Return some responses of the newest recorded step, those to one prompt together: first where rewards differ."""
    if not run.steps:
        return {"step": None, "groups": []}
    try:
        step = open_step(run, run.steps[-1])
        groups = step.responses["group"].tolist()
        rewards = step.responses["reward"].tolist()
        members: dict[int, list[int]] = {}
        for response, group in enumerate(groups):
            members.setdefault(group, []).append(response)
        spread = {g: max(rewards[r] for r in of) - min(rewards[r] for r in of) for g, of in members.items()}
        chosen = sorted(members, key=lambda group: -spread[group])[:GROUPS]
        shown_groups = [
            {"size": len(members[g]), "rows": [_row(step, r, SHOWN_SAMPLE) for r in _spread_out(members[g], rewards)]}
            for g in chosen
        ]
    except (RecordError, LookupError) as error:
        return {"step": run.steps[-1], "groups": [], "note": truncated(str(error), 300)}
    return {"step": step.number, "groups": shown_groups}


def _spread_out(members: list[int], rewards: list[float]) -> list[int]:
    """Return a few responses of a group, from the lowest reward to the highest."""
    ordered = sorted(members, key=lambda response: rewards[response])
    count = min(SIDE_BY_SIDE, len(ordered))
    return [ordered[round(n * (len(ordered) - 1) / max(count - 1, 1))] for n in range(count)]


def open_step(run: WatchedRun, number: int) -> RecordedStep:
    """Open a recorded step that lies in the run; RecordError says what is wrong."""
    run.check_step(number)
    return run.open_records().step(number)


def _step_passes(number: int, wanted: ResponseFilter) -> bool:
    return (
        (wanted.first is None or number >= wanted.first)
        and (wanted.last is None or number <= wanted.last)
        and (wanted.before is None or number < wanted.before)
    )


def _rows(step: RecordedStep, wanted: ResponseFilter, whole: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the responses of a step that pass; texts are decoded only for those whose numbers do."""
    for response in range(step.info.responses):
        columns = step.responses
        reward, length = float(columns["reward"][response]), int(columns["tokens"][response])
        if (
            (wanted.min_reward is not None and reward < wanted.min_reward)
            or (wanted.max_reward is not None and reward > wanted.max_reward)
            or (wanted.min_length is not None and length < wanted.min_length)
            or (wanted.max_length is not None and length > wanted.max_length)
            or (wanted.verdict and columns["verdict"][response][:60] != wanted.verdict[:60])
        ):
            continue
        if wanted.outcome and wanted.outcome not in _outcomes(step, response):
            continue
        if wanted.text:
            words = wanted.text.casefold()
            if words not in step.text(response).casefold() and words not in columns["prompt"][response].casefold():
                continue
        yield _row(step, response, None if whole else SHOWN_TEXT)


def _row(step: RecordedStep, response: int, longest: int | None) -> dict[str, Any]:
    """Return a response; without `longest` all of its texts."""
    columns = step.responses
    text = step.text(response)
    outcomes = _outcomes(step, response)
    row = {
        "step": step.number,
        "response": response,
        "group": int(columns["group"][response]),
        "sample": int(columns["sample"][response]),
        "reward": float(columns["reward"][response]),
        "verdict": truncated(str(columns["verdict"][response]), 60),
        "length": int(columns["tokens"][response]),
        "finished": bool(columns["finished"][response]),
        "text": text if longest is None else truncated(text, longest),
    }
    for name in ("prompt", "answer", "extracted", "source"):
        value = str(columns[name][response])
        row[name] = value if longest is None else truncated(value, SHOWN_PROMPT if name == "prompt" else 300)
    if outcomes:
        row |= {"outcomes": sorted(set(outcomes)), "failed_calls": sum(each != "ok" for each in outcomes)}
        row["calls"] = len(outcomes)
    return row


def _outcomes(step: RecordedStep, response: int) -> list[str]:
    if "calls" not in step.responses:
        return []
    try:
        return [truncated(call.outcome, 100) for call in step.calls(response)]
    except RecordError:  # the microscope has a note about it
        return []
