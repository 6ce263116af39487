"""The turns of conversations in records: written whole or cut, read back, and never more than a bounded size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.record.made_records import VOCABULARY, made_run, made_step, record
from trimtab.agents import Call
from trimtab.data import Response
from trimtab.record import RecordedCall, RecordedObservation, RecordError, open_run
from trimtab.record.conversation import (
    MAX_ENTRIES,
    MAX_TEXT,
    MAX_TEXTS,
    calls_json,
    cut,
    observations_json,
    read_calls,
    read_observations,
)


def call(**changes: Any) -> Call:
    return replace(Call("python", {"code": "1+1"}, "ok", 0.5, "2"), **changes)


def observed(text: str) -> list[RecordedObservation]:
    return read_observations({"observations": ["", text]}, 1)


def called(text: str) -> list[RecordedCall]:
    return read_calls({"calls": ["", text]}, 1)


def test_turns_are_read_as_they_were_written() -> None:
    tokens = [1, 1, 1, 3, 2, 0, 1, 1, 1, 2]
    given = Response(tokens, [], True, observed=((2, 6), (9, 10)))
    found = observed(observations_json(given, VOCABULARY))
    assert found == [RecordedObservation(2, 4, "1 and 2<end>"), RecordedObservation(5, 1, "2")]
    calls = [call(), call(turn=1, outcome="timeout", seconds=10.0)]
    assert called(calls_json(calls)) == [
        RecordedCall(0, "python", '{"code": "1+1"}', "ok", 0.5),
        RecordedCall(1, "python", '{"code": "1+1"}', "timeout", 10.0),
    ]


def test_a_record_has_them_and_one_without_tools_or_of_an_older_version_has_none(tmp_path: Path) -> None:
    record(tmp_path / "tools", [made_step(1, optional=("current_logp",))])
    step = open_run(tmp_path / "tools").step(1)
    assert [each.text for each in step.observations(2)] == ["2 and 2"] and step.calls(2)[0].tool == "add"
    assert step.responses["ended"][2] == "answer"
    plain = open_run(made_run(tmp_path / "plain", 1)).step(1)
    assert not {"observations", "calls", "ended"} & set(plain.responses)
    assert plain.observations(0) == [] and plain.calls(0) == []


def test_a_flood_is_cut_in_the_middle_and_says_how_much_is_missing() -> None:
    spans = tuple((n * 100_001 + 1, (n + 1) * 100_001) for n in range(100))
    flood = Response(np.ones(100 * 100_001, dtype=np.int64), [], True, observed=spans)
    text = observations_json(flood, VOCABULARY)
    found = observed(text)
    assert len(found) == MAX_ENTRIES and len(text) < 2 * MAX_TEXTS
    assert "characters not recorded" in found[0].text and found[0].tokens == 100_000
    calls = calls_json([call(arguments={"x": "x" * 10**6}, tool="y" * 10**6)] * 1_000)
    assert len(calls) < 2 * MAX_TEXTS and len(called(calls)) == MAX_ENTRIES
    assert cut("a" * 10 + "b" * 10, 6) == "aaa[... 14 characters not recorded ...]bbb"
    assert cut("a" * MAX_TEXT, MAX_TEXT) == "a" * MAX_TEXT


def test_what_a_model_may_write_as_arguments_can_be_stored() -> None:
    arguments = json.loads('{"half": "\\ud800", "number": NaN, "deep": [[[]]], "zero": "\\u0000"}')
    (found,) = called(calls_json([call(arguments=arguments)]))
    assert found.arguments.encode() and '"half": "?"' in found.arguments


@pytest.mark.parametrize(
    "text", ["no json", "{}", '[{"after": -1}]', '[{"after": 1, "tokens": 1}]', '["x"]', "[" * 10**5, "1"]
)
def test_turns_of_somebody_elses_making_are_an_error_in_words(text: str) -> None:
    with pytest.raises(RecordError, match="`observations` of response 1 cannot be read"):
        observed(text)
    with pytest.raises(RecordError, match="`calls` of response 1 cannot be read"):
        called(text)
