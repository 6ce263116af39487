"""The microscope's responses as JSON: the text of every token, all its numbers, and the effects of other objectives."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from trimtab.insight.report.embed import encode_array, safe_json, truncated
from trimtab.insight.report.response_selection import ResponseExcerpt
from trimtab.insight.report.token_table import (
    StepTokenTable,
    TokenEffects,
    mini_batches,
    read_checked_step,
    token_effects,
    token_table,
)
from trimtab.insight.report.turns import count_turns, read_turns, turns_json
from trimtab.objectives import Objective, Reason
from trimtab.record import RecordedStep, RecordError, Records, Vocabulary

LONGEST_TOKEN = 200  # characters
LONGEST_PROMPT = 4_000
PREVIEW_TOKENS, LONGEST_PREVIEW = 24, 80  # tokens and characters in the list of responses
MOST_REWARDS = 20  # of a response
BYTES_PER_TOKEN = 64  # estimated; without what compared objectives add
BYTES_PER_COMPARED_OBJECTIVE = 8


@dataclass
class MicroscopeData:
    """Responses for the page: entries of its list, a JSON block each, and notes on what was left out."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def affordable_tokens(byte_budget: int, compared: int) -> int:
    """Return how many tokens fit into a number of bytes."""
    return byte_budget // (BYTES_PER_TOKEN + BYTES_PER_COMPARED_OBJECTIVE * compared)


def microscope_data(
    records: Records,
    excerpts: Sequence[ResponseExcerpt],
    recorded: Objective | None,
    compared: Mapping[str, Objective],
    *,
    byte_budget: int,
    first_block: int = 0,
) -> MicroscopeData:
    """Read the excerpts' steps again, and encode the excerpts that fit into the budget."""
    data = MicroscopeData()
    try:
        vocabulary = records.vocabulary
    except RecordError as error:
        data.notes.append(f"{error}: tokens are shown by their numbers")
        vocabulary = Vocabulary([], [])
    left, skipped = byte_budget, 0
    for number, group in groupby(excerpts, key=lambda excerpt: excerpt.step):
        try:
            table = token_table(read_checked_step(records, number), recorded)
        except RecordError as error:  # a run that is still training may delete records meanwhile
            data.notes.append(f"step {number} is left out: {error}")
            continue
        effects = dict(_compared_effects(table.step, compared, data.notes))
        for excerpt in group:
            turns = read_turns(table.step, excerpt.response, data.notes)
            length = int(table.step.responses["tokens"][excerpt.response])
            content = response_json(table, {name: effects.get(name) for name in compared}, excerpt, vocabulary)
            block = safe_json(content | {"turns": turns_json(*turns, excerpt, length)})
            size = len(block.encode())  # the selection only estimates sizes, and a token may be 200 characters
            if size > left:
                skipped += 1
                continue
            left -= size
            entry = list_entry(table, excerpt, first_block + len(data.blocks), vocabulary)
            data.entries.append(entry | count_turns(*turns, length))
            data.blocks.append(block)
    if skipped:
        data.notes.append(f"{skipped} responses were left out to keep the report small")
    return data


def _compared_effects(
    step: RecordedStep, compared: Mapping[str, Objective], notes: list[str]
) -> Iterator[tuple[str, TokenEffects]]:
    """Yield the effects of every compared objective whose fields are recorded."""
    batches = mini_batches(step, frozenset[str]().union(*(objective.needs for objective in compared.values())))
    for name, objective in compared.items():
        try:
            yield name, token_effects(step, objective, batches)
        except (ValueError, RecordError) as error:
            # Once for each objective, not for each step.
            if not any(known.startswith(f"{name} cannot") for known in notes):
                notes.append(f"{name} cannot be planned over these records: {truncated(str(error), 200)}")


def list_entry(table: StepTokenTable, excerpt: ResponseExcerpt, block: int, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return what the page needs to list, filter and sort a response before its block is parsed."""
    step, tokens = table.step, _token_slice(table.step, excerpt)
    return {
        "block": block,
        "step": excerpt.step,
        "response": excerpt.response,
        "start": excerpt.start,
        "tokens": excerpt.stop - excerpt.start,
        "length": int(step.responses["tokens"][excerpt.response]),
        "reward": float(step.responses["reward"][excerpt.response]),
        "verdict": truncated(str(step.responses["verdict"][excerpt.response]), 60),
        "selected_for": excerpt.selected_for,
        "text": vocabulary.decode(step.tokens["token"][tokens][:PREVIEW_TOKENS].tolist())[:LONGEST_PREVIEW],
        "silenced": int(((table.effects.reason[tokens] & int(Reason.SILENCED)) != 0).sum()),
        "clipped": int(table.effects.clipped[tokens].sum()),
        "gradient": float(table.grad_norm[tokens].max(initial=0.0)),
    }


def response_json(
    table: StepTokenTable, compared: Mapping[str, TokenEffects | None], excerpt: ResponseExcerpt, vocabulary: Vocabulary
) -> dict[str, Any]:
    """Return a response with all its numbers; `compared` is None for an objective that could not be planned."""
    step, tokens = table.step, _token_slice(table.step, excerpt)
    ids = step.tokens["token"][tokens].tolist()
    # Everything a model or a task wrote is truncated: one endless prompt must not fill the page.
    texts = {name: step.responses[name][excerpt.response] for name in ("prompt", "answer", "extracted", "source")}
    columns = ("logp", "entropy", "logp_grad_norm", "phi", "log_ratio")
    arrays = {name: encode_array(getattr(table, name)[tokens]) for name in columns}
    arrays["special"] = encode_array([vocabulary.is_special(token) for token in ids], "u1")
    if "segment" in step.tokens:
        arrays["segment"] = encode_array(step.tokens["segment"][tokens], "i4")
    if "tool_tokens" in step.tokens:
        arrays["tool_tokens"] = encode_array(step.tokens["tool_tokens"][tokens], "i4")
    return {
        **{name: truncated(str(text), LONGEST_PROMPT) for name, text in texts.items()},
        "rewards": _rewards(step, excerpt.response),
        "finished": bool(step.responses["finished"][excerpt.response]),
        "ended": truncated(str(step.responses["ended"][excerpt.response]), 60) if "ended" in step.responses else "",
        "pieces": [truncated(piece, LONGEST_TOKEN) for piece in vocabulary.pieces(ids)],
        "arrays": arrays,
        "recorded": _effects_json(table.effects, tokens),
        "compared": [effects and _effects_json(effects, tokens) for effects in compared.values()],
    }


def _rewards(step: RecordedStep, response: int) -> dict[str, float]:
    """Return each of several rewards by name; what is recorded may be anybody's."""
    if "rewards" not in step.responses:
        return {}
    try:
        found = json.loads(step.responses["rewards"][response] or "{}")
        return {truncated(str(name), 40): float(value) for name, value in list(found.items())[:MOST_REWARDS]}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _effects_json(effects: TokenEffects, tokens: slice) -> dict[str, Any]:
    types = {"reason": "i2", "clipped": "u1"}
    return {name: encode_array(values[tokens], types.get(name, "f4")) for name, values in vars(effects).items()}


def _token_slice(step: RecordedStep, excerpt: ResponseExcerpt) -> slice:
    first = step.offsets[excerpt.response]
    return slice(first + excerpt.start, first + excerpt.stop)
