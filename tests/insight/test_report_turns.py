"""The turns of a response for the page: every message, call and reply in its place, in whole responses and excerpts."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.insight.report_runs import Made, data_of, make_run, response_of
from trimtab.insight.report import write_report
from trimtab.insight.report.microscope import LONGEST_REPLY, ResponseExcerpt, count_turns, turns_json
from trimtab.record import RecordedCall, RecordedObservation

OBSERVED = [RecordedObservation(3, 5, "first"), RecordedObservation(8, 2, "second")]
CALLS = [RecordedCall(turn, "python", "{}", outcome, 0.5) for turn, outcome in ((0, "ok"), (1, "timeout"), (1, "ok"))]


def spans(start: int, stop: int, length: int = 10) -> list[tuple[int, int, int, int, str | None]]:
    """Return number, start, end, calls and reply of every message of an excerpt."""
    turns = turns_json(OBSERVED, CALLS, ResponseExcerpt(1, 0, start, stop), length)
    replies = [turn["reply"] and turn["reply"]["text"] for turn in turns]
    return [
        (turn["number"], turn["start"], turn["end"], len(turn["calls"]), reply)
        for turn, reply in zip(turns, replies, strict=True)
    ]


def test_a_whole_response_has_every_message_with_its_calls_and_the_reply_to_it() -> None:
    assert spans(0, 10) == [(1, 0, 3, 1, "first"), (2, 3, 8, 2, "second"), (3, 8, 10, 0, None)]
    assert count_turns(OBSERVED, CALLS, 10) == {"messages": 3, "calls": 3, "failed_calls": 1}


def test_an_excerpt_has_the_turns_that_it_shows_at_its_own_places() -> None:
    assert spans(4, 7) == [(2, 0, 3, 0, None)]
    assert spans(4, 9) == [(2, 0, 4, 2, "second"), (3, 4, 5, 0, None)]
    assert spans(0, 2) == [(1, 0, 2, 0, None)]


def test_a_response_may_end_with_a_reply_and_a_call_may_have_none() -> None:
    assert spans(0, 8, length=8) == [(1, 0, 3, 1, "first"), (2, 3, 8, 2, "second")]
    assert count_turns(OBSERVED, CALLS, 8)["messages"] == 2
    (only,) = turns_json([], CALLS[:1], ResponseExcerpt(1, 0, 0, 4), 4)
    assert (only["end"], len(only["calls"]), only["reply"]) == (4, 1, None)


def test_a_response_without_turns_has_none() -> None:
    assert turns_json([], [], ResponseExcerpt(1, 0, 0, 4), 4) == [] and count_turns([], [], 4) == {}


def test_observations_past_the_end_and_endless_texts_stay_in_bounds() -> None:
    odd = [RecordedObservation(99, 5, "x" * 10**6)]
    call = RecordedCall(0, "y" * 10**6, "z" * 10**6, "w" * 10**6, 0.0)
    (turn,) = turns_json(odd, [call], ResponseExcerpt(1, 0, 0, 4), 4)
    assert turn["end"] == 4
    texts = (turn["reply"]["text"], *(turn["calls"][0][name] for name in ("tool", "arguments", "outcome")))
    assert all(len(text) < LONGEST_REPLY + 100 for text in texts)


@pytest.mark.parametrize("column", ["observations", "calls"])
def test_turns_that_cannot_be_read_become_one_note_and_the_tokens_are_shown(tmp_path: Path, column: str) -> None:
    texts = {column: ["no json", '[{"after": "x"}]', "[" * 10**5, "{}"]}
    page = write_report([make_run(tmp_path / "run", Made(steps=2, texts=texts, optional=("current_logp",)))])
    run = data_of(page.read_text(encoding="utf-8"))["runs"][0]
    assert len(run["responses"]) == 8
    assert [f"`{column}` of response" in note for note in run["notes"]] == [True]
    assert response_of(page.read_text(encoding="utf-8"), 0)["turns"] == []
