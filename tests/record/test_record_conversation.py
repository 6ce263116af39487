"""The turns of conversations in records: written whole or cut, read back, and never more than a bounded size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.record.made_records import VOCABULARY, made_run, made_step, record
from trimtab.record import Observation, RecordedCall, RecordedConversation, RecordError, arguments_text, open_run
from trimtab.record.conversation import (
    MAX_ENTRIES,
    MAX_TEXT,
    MAX_TEXTS,
    calls_json,
    cut,
    observations_json,
    read_conversation,
)


def call(**changes: Any) -> RecordedCall:
    return replace(RecordedCall(0, "python", '{"code": "1+1"}', "ok", 0.5), **changes)


def read(observations: str = "", calls: str = "", ended: str = "") -> RecordedConversation:
    return read_conversation({"observations": [observations], "calls": [calls], "ended": [ended]}, 0)


def test_turns_are_read_as_they_were_written() -> None:
    observed = [Observation(2, [1, 3, 2, 0]), Observation(5, [])]
    calls = [call(), call(turn=1, outcome="timeout", seconds=10.0)]
    held = read(observations_json(observed, VOCABULARY), calls_json(calls), "answer")
    assert [(each.after, each.tokens, each.text) for each in held.observations] == [(2, 4, "1 and 2<end>"), (5, 0, "")]
    assert held.calls == calls and held.ended == "answer"


def test_a_record_has_them_and_one_without_tools_or_of_an_older_version_has_none(tmp_path: Path) -> None:
    record(tmp_path / "tools", [made_step(1, optional=("current_logp",))])
    held = open_run(tmp_path / "tools").step(1).conversation(2)
    assert [each.text for each in held.observations] == ["2 and 2"] and held.calls[0].tool == "add"
    plain = open_run(made_run(tmp_path / "plain", 1)).step(1)
    assert not {"observations", "calls", "ended"} & set(plain.responses)
    assert plain.conversation(0) == RecordedConversation()


def test_a_flood_is_cut_in_the_middle_and_says_how_much_is_missing() -> None:
    flood = [Observation(n, [1] * 100_000) for n in range(1_000)]
    text = observations_json(flood, VOCABULARY)
    held = read(text)
    assert len(held.observations) == MAX_ENTRIES and len(text) < 2 * MAX_TEXTS
    assert "characters not recorded" in held.observations[0].text and held.observations[0].tokens == 100_000
    calls = calls_json([call(arguments="x" * 10**6, tool="y" * 10**6)] * 1_000)
    assert len(calls) < 2 * MAX_TEXTS and len(read("", calls).calls) == MAX_ENTRIES
    assert cut("a" * 10 + "b" * 10, 6) == "aaa[... 14 characters not recorded ...]bbb"
    assert cut("a" * MAX_TEXT, MAX_TEXT) == "a" * MAX_TEXT


def test_what_a_model_may_write_as_arguments_can_be_stored() -> None:
    arguments = json.loads('{"half": "\\ud800", "number": NaN, "deep": [[[]]], "zero": "\\u0000"}')
    (found,) = read("", calls_json([call(arguments=arguments_text(arguments))])).calls
    assert found.arguments.encode() and '"half": "?"' in found.arguments


@pytest.mark.parametrize(
    "text", ["no json", "{}", '[{"after": -1}]', '[{"after": 1, "tokens": 1}]', '["x"]', "[" * 10**5, "1"]
)
def test_turns_of_somebody_elses_making_are_an_error_in_words(text: str) -> None:
    with pytest.raises(RecordError, match="`observations` of response 0 cannot be read"):
        read(text)
    with pytest.raises(RecordError, match="`calls` of response 0 cannot be read"):
        read("", text)
