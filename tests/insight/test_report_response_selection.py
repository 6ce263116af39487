"""The microscope holds responses of every kind within its budget, and of long ones the tokens that matter."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.insight.report_runs import Made, data_of, make_run, response_of
from trimtab.insight.report import page_data, write_report
from trimtab.insight.report.microscope import (
    EXCERPT,
    SELECTION_REASONS,
    ResponseCandidate,
    ResponseExcerpt,
    affordable_tokens,
    select_responses,
)


def candidate(score: float, step: int, response: int, place: float) -> ResponseCandidate:
    length = 1 + (7_919 * step + 104_729 * response) % 20_000
    return ResponseCandidate(score, step, response, int(place * (length - 1)), length)


candidates = st.builds(candidate, st.floats(0, 10), st.integers(1, 9), st.integers(0, 5), st.floats(0, 1))
tables = st.dictionaries(st.sampled_from(sorted(SELECTION_REASONS)), st.lists(candidates, max_size=20))


@given(tables, st.integers(0, 60_000), st.integers(1, 30))
def test_no_selection_is_over_its_budget_and_none_is_empty_or_twice(
    found: dict[str, list[ResponseCandidate]], tokens: int, most: int
) -> None:
    excerpts = select_responses(found, tokens, most)
    assert sum(excerpt.stop - excerpt.start for excerpt in excerpts) <= tokens
    assert len(excerpts) <= most
    assert all(excerpt.start < excerpt.stop and excerpt.selected_for for excerpt in excerpts)
    places = [(excerpt.step, excerpt.response, excerpt.start) for excerpt in excerpts]
    assert places == sorted(set(places))


def test_every_kind_gets_its_turn() -> None:
    found = {
        "gradient": [ResponseCandidate(n, 1, n, 0, 100) for n in range(50)],
        "random": [ResponseCandidate(0.5, 2, n, 0, 100) for n in range(50)],
        "alarm": [ResponseCandidate(9.0, 3, 0, 0, 100)],
    }
    excerpts = select_responses(found, 10_000, 9)
    kinds = [kind for excerpt in excerpts for kind in excerpt.selected_for]
    assert kinds.count("alarm") == 1 and kinds.count("gradient") == kinds.count("random") == 4
    assert {excerpt.response for excerpt in excerpts if "gradient" in excerpt.selected_for} == {
        46,
        47,
        48,
        49,
    }  # the best ones


def test_a_response_that_is_selected_for_two_reasons_is_there_once() -> None:
    found = {"gradient": [ResponseCandidate(5.0, 1, 2, 7, 50)], "silenced": [ResponseCandidate(3.0, 1, 2, 30, 50)]}
    (excerpt,) = select_responses(found, 10_000)
    assert excerpt == ResponseExcerpt(1, 2, 0, 50, ["silenced", "gradient"])


def test_a_long_response_comes_whole_where_there_is_room() -> None:
    (excerpt,) = select_responses({"longest": [ResponseCandidate(15_000, 1, 0, 0, 15_000)]}, 80_000)
    assert (excerpt.start, excerpt.stop) == (0, 15_000)


@pytest.mark.parametrize(("position", "start"), [(0, 0), (9_000, 9_000 - EXCERPT // 2), (14_999, 15_000 - EXCERPT)])
def test_else_an_excerpt_around_the_token_comes(position: int, start: int) -> None:
    (excerpt,) = select_responses({"gradient": [ResponseCandidate(5.0, 1, 0, position, 15_000)]}, 4_000)
    assert (excerpt.start, excerpt.stop) == (start, start + EXCERPT)
    assert excerpt.start <= position < excerpt.stop


def test_more_compared_objectives_leave_room_for_fewer_tokens() -> None:
    assert affordable_tokens(1_000_000, 6) < affordable_tokens(1_000_000, 0)


def test_a_report_keeps_to_its_bytes_and_says_what_it_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huge = ["<end>", *("\u0001" * 190 + str(n) for n in range(9))]
    run = make_run(tmp_path / "run", Made(steps=3, pieces=huge, lengths=(200, 200, 200, 200)))
    monkeypatch.setattr(page_data, "MICROSCOPE_BYTES", 300_000)
    path = write_report([run])
    assert path.stat().st_size < 300_000 + 200_000
    notes = data_of(path.read_text(encoding="utf-8"))["runs"][0]["notes"]
    assert any("left out to keep the report small" in note for note in notes)


def test_a_token_without_end_is_cut(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made(steps=1, pieces=["<end>", "x" * 100_000]))
    page = write_report([run]).read_text(encoding="utf-8")
    assert "more characters" in "".join(response_of(page, 0)["pieces"])
    assert len(page) < 1_000_000


def test_requested_steps_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", Made(steps=30))
    for name, value in {"MOST_STEPS": 3, "FEWEST_STEPS": 3, "MOST_HIGHLIGHTED": 1}.items():
        monkeypatch.setattr(f"trimtab.insight.report.run_files.{name}", value)
    page = write_report([run], steps=[7, 77]).read_text(encoding="utf-8")
    shown = data_of(page)["runs"][0]
    assert sum(entry["step"] == 7 for entry in shown["responses"]) == 4  # all of its responses
    assert "step 77 is not recorded: the nearest of the 30 recorded steps, 1 to 30, is 30" in shown["notes"]
