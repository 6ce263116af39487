"""The microscope's responses: text in pieces, every number of every token, and what others would have done."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from trimtab.insight.report.embed import pack, safe_json, shortened
from trimtab.insight.report.measured import Measured, Treated, batches_of, measure, open_step, treat
from trimtab.insight.report.response_selection import Item
from trimtab.objectives import Objective, Reason
from trimtab.record import RecordedStep, RecordError, Records, Vocabulary

LONGEST_PIECE = 200  # characters of one token
LONGEST_PROMPT = 4_000
PREVIEW, LONGEST_PREVIEW = 24, 80  # tokens and characters that the list shows
BYTES_PER_TOKEN = 64  # about; without what other objectives add
BYTES_PER_OTHER = 8


@dataclass
class Shelf:
    """Responses ready for the page: what its list shows, and a block of JSON each. `notes` say what was left out."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def affordable_tokens(budget: int, others: int) -> int:
    """How many tokens fit into so many bytes."""
    return budget // (BYTES_PER_TOKEN + BYTES_PER_OTHER * others)


def fill_shelf(
    records: Records,
    items: Sequence[Item],
    recorded: Objective | None,
    others: Mapping[str, Objective],
    budget: int,
    first_block: int = 0,
) -> Shelf:
    """Read the items' steps once more, and put every item on the shelf for which there is room."""
    shelf = Shelf()
    words = _words(records, shelf.notes)
    room, crowded = budget, 0
    for number, group in groupby(items, key=lambda item: item.step):
        try:
            measured = measure(open_step(records, number), recorded)
        except RecordError as error:  # a run that goes on may thin its records meanwhile
            shelf.notes.append(f"step {number} is left out: {error}")
            continue
        beside = dict(_beside(measured.step, others, shelf.notes))
        for item in group:
            block = safe_json(block_of(measured, beside, item, list(others), words))
            size = len(block.encode())
            if size > room:
                crowded += 1
                continue
            room -= size
            shelf.entries.append(entry_of(measured, item, first_block + len(shelf.blocks), words))
            shelf.blocks.append(block)
    if crowded:
        shelf.notes.append(f"{crowded} responses were left out to keep the report small")
    return shelf


def _words(records: Records, notes: list[str]) -> Vocabulary:
    """The run's vocabulary; where it is damaged, one in which every token is shown by its number."""
    try:
        return records.vocabulary
    except RecordError as error:
        notes.append(f"{error}: tokens are shown by their numbers")
        return Vocabulary([], [])


def _beside(step: RecordedStep, others: Mapping[str, Objective], notes: list[str]) -> Iterator[tuple[str, Treated]]:
    """Every other objective that the record has the fields for."""
    batches = batches_of(step, frozenset[str]().union(*(objective.needs for objective in others.values())))
    for name, objective in others.items():
        try:
            yield name, treat(step, objective, batches)
        except (ValueError, RecordError) as error:
            note = f"{name} cannot be planned over these records: {shortened(str(error), 200)}"
            if not any(known.startswith(f"{name} cannot") for known in notes):
                notes.append(note)


def entry_of(measured: Measured, item: Item, block: int, words: Vocabulary) -> dict[str, Any]:
    """A line of the list: what is needed to filter and sort without opening the response."""
    step, span = measured.step, _span(measured.step, item)
    reason = measured.treated.reason[span]
    return {
        "block": block,
        "step": item.step,
        "response": item.response,
        "start": item.start,
        "tokens": item.stop - item.start,
        "length": int(step.responses["tokens"][item.response]),
        "reward": float(step.responses["reward"][item.response]),
        "verdict": shortened(str(step.responses["verdict"][item.response]), 60),
        "kinds": item.kinds,
        "text": words.decode(step.tokens["token"][span][:PREVIEW].tolist())[:LONGEST_PREVIEW],
        "silenced": int(((reason & int(Reason.SILENCED)) != 0).sum()),
        "clipped": int(measured.treated.clipped[span].sum()),
        "gradient": float(measured.gradient[span].max(initial=0.0)),
    }


def block_of(
    measured: Measured, beside: Mapping[str, Treated], item: Item, names: Sequence[str], words: Vocabulary
) -> dict[str, Any]:
    """A response with all its numbers."""
    step, span = measured.step, _span(measured.step, item)
    ids = step.tokens["token"][span].tolist()
    texts = {name: step.responses[name][item.response] for name in ("prompt", "answer", "extracted", "source")}
    arrays = {
        "logp": pack(measured.logp[span]),
        "entropy": pack(measured.entropy[span]),
        "norm": pack(measured.norm[span]),
        "phi": pack(measured.phi[span]),
        "log_ratio": pack(measured.log_ratio[span]),
        "special": pack([words.is_special(token) for token in ids], "u1"),
    }
    if "segment" in step.tokens:
        arrays["segment"] = pack(step.tokens["segment"][span], "i4")
    return {
        **{name: shortened(str(text), LONGEST_PROMPT) for name, text in texts.items()},
        "finished": bool(step.responses["finished"][item.response]),
        "pieces": [shortened(piece, LONGEST_PIECE) for piece in words.pieces(ids)],
        "arrays": arrays,
        "recorded": _pack_treated(measured.treated, span),
        "others": [_pack_treated(beside[name], span) if name in beside else None for name in names],
    }


def _pack_treated(treated: Treated, span: slice) -> dict[str, Any]:
    return {
        "coefficient": pack(treated.coefficient[span]),
        "advantage": pack(treated.advantage[span]),
        "weight": pack(treated.weight[span]),
        "reason": pack(treated.reason[span], "i2"),
        "clipped": pack(treated.clipped[span], "u1"),
        "clip_low": pack(treated.clip_low[span]),
        "clip_high": pack(treated.clip_high[span]),
    }


def _span(step: RecordedStep, item: Item) -> slice:
    first = step.offsets[item.response]
    return slice(first + item.start, first + item.stop)
