"""Reading: three lines in a notebook, one step at a time, one column at a time, while the run still writes."""

from __future__ import annotations

import gc
import threading
import tracemalloc
import weakref
from pathlib import Path

import numpy as np
import pytest

import trimtab.record
from helpers.record.made_records import VOCABULARY, made_run, made_step, record, same
from trimtab.record import RecordError, RecordSettings, Vocabulary, open_run
from trimtab.record.layout import RECORDS_FOLDER


def test_three_lines_are_enough(tmp_path: Path) -> None:
    made_run(tmp_path, 3)
    records = trimtab.record.open_run(tmp_path)
    step = records.step(2)
    values = step.tokens["old_logp"]
    assert isinstance(values, np.ndarray) and values.dtype == np.float32
    assert values.tobytes() == made_step(2).tokens["old_logp"].tobytes()


def test_the_steps_are_listed_and_iterated_in_order(tmp_path: Path) -> None:
    records = open_run(made_run(tmp_path, 12))
    assert records.steps == list(range(1, 13)) and len(records) == 12
    assert [step.number for step in records] == records.steps
    assert all(same(step, made_step(step.number)) for step in records)


def test_a_range_of_steps_includes_both_ends(tmp_path: Path) -> None:
    records = open_run(made_run(tmp_path, 6))
    assert [step.number for step in records.select(2, 4)] == [2, 3, 4]
    assert [step.number for step in records.select(first=5)] == [5, 6]
    assert [step.number for step in records.select(last=1)] == [1]
    assert list(records.select(7)) == []


def test_columns_are_read_when_first_used(tmp_path: Path) -> None:
    step = open_run(made_run(tmp_path, 1)).step(1)
    _ = step.tokens["entropy"]
    assert set(step.tokens._read) == {"entropy"}
    step.tokens.load(["reason", "weight"])
    assert set(step.tokens._read) == {"entropy", "reason", "weight"}
    assert step.tokens["entropy"] is step.tokens["entropy"]


def test_columns_cannot_be_changed_by_mistake(tmp_path: Path) -> None:
    values = open_run(made_run(tmp_path, 1)).step(1).tokens["old_logp"]
    with pytest.raises(ValueError, match="read-only"):
        values[0] = 0.0


def test_the_error_for_a_missing_column_names_those_that_are_there(tmp_path: Path) -> None:
    step = open_run(made_run(tmp_path, 1)).step(1)
    with pytest.raises(KeyError, match=r"no column 'ref_logp'; it has response, token"):
        _ = step.tokens["ref_logp"]
    assert "ref_logp" not in step.tokens and "old_logp" in step.tokens


def test_tables_come_as_arrow_too(tmp_path: Path) -> None:
    step = open_run(made_run(tmp_path, 1)).step(1)
    assert step.tokens.table().num_rows == 10
    assert step.responses.table().column("prompt").to_pylist() == ["1+0="] * 4


def test_responses_have_their_texts_and_numbers(tmp_path: Path) -> None:
    step = open_run(made_run(tmp_path, 1)).step(1)
    assert step.responses["verdict"] == made_step(1).responses["verdict"]
    assert step.responses["reward"].dtype == np.float32
    assert step.responses["tokens"].tolist() == [3, 1, 4, 2]
    assert step.offsets == [0, 3, 4, 8, 10]


def test_updates_have_their_rows_of_the_tables(tmp_path: Path) -> None:
    step = open_run(made_run(tmp_path, 1)).step(1)
    first, second = step.updates
    assert (first.responses, first.tokens) == (slice(0, 2), slice(0, 4))
    assert (second.responses, second.tokens) == (slice(2, 4), slice(4, 10))
    joined = np.concatenate([first.column("old_logp"), second.column("old_logp")])
    assert joined.tobytes() == step.tokens["old_logp"].tobytes()


def test_the_error_for_a_step_that_is_not_recorded_names_the_nearest(tmp_path: Path) -> None:
    record(tmp_path, [made_step(step) for step in range(1, 12)], settings=RecordSettings(every=5))
    with pytest.raises(RecordError, match=r"step 8 is not recorded .*the nearest is 6"):
        open_run(tmp_path).step(8)


def test_a_folder_without_records_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"holds no records.*record\.enabled"):
        open_run(tmp_path)
    (tmp_path / RECORDS_FOLDER).mkdir()
    with pytest.raises(RecordError, match=r"manifest\.json is missing"):
        open_run(tmp_path)


# --- text


def test_text_is_decoded_without_the_tokenizer(tmp_path: Path) -> None:
    data = made_step(1, [4])
    data.tokens["token"][:] = [1, 3, 2, 0]
    record(tmp_path, [data])
    step = open_run(tmp_path).step(1)
    assert step.pieces(0) == ["1", " and ", "2", "<end>"]
    assert step.text(0) == "1 and 2"


def test_a_character_cut_into_tokens_comes_with_its_last_one() -> None:
    assert VOCABULARY.pieces([5, 6, 1]) == ["", "ü", "1"]
    assert VOCABULARY.decode([1, 5, 6]) == "1ü"


def test_bytes_that_are_no_text_are_replaced_and_lose_nothing_else() -> None:
    assert VOCABULARY.pieces([5, 1]) == ["", "�1"]
    assert VOCABULARY.pieces([6]) == ["�"]
    assert VOCABULARY.pieces([1, 5]) == ["1", "�"]
    assert VOCABULARY.pieces([]) == []


@pytest.mark.parametrize("token", [7, 1_000_000, -1])
def test_ids_beyond_the_vocabulary_are_special_and_have_a_name(token: int) -> None:
    assert VOCABULARY.is_special(token)
    assert VOCABULARY.pieces([1, token]) == ["1", f"<{token}>"]


def test_the_bytes_of_text_leave_special_tokens_out() -> None:
    vocabulary = Vocabulary([b"<s>", b"a", b""], [True, False, False])
    assert vocabulary.text_bytes == {1: b"a", 2: b""} and len(vocabulary) == 3


# --- one step at a time


def test_iterating_over_a_run_holds_one_step_at_a_time(tmp_path: Path) -> None:
    records = open_run(made_run(tmp_path, 5))
    seen = []
    for step in records:
        gc.collect()
        assert sum(reference() is not None for reference in seen) <= 1, "the step before may linger, no more"
        seen.append(weakref.ref(step))


def test_memory_does_not_grow_with_the_length_of_a_run(tmp_path: Path) -> None:
    data = [made_step(step, [200] * 20) for step in range(1, 31)]
    record(tmp_path, data)
    records = open_run(tmp_path)

    def peak(last: int) -> int:
        gc.collect()
        tracemalloc.start()
        for step in records.select(last=last):
            _ = step.tokens["old_logp"], step.tokens["entropy"]
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    peak(2)
    assert peak(30) < 1.5 * peak(3)


def test_records_are_read_while_the_run_writes_them(tmp_path: Path) -> None:
    made_run(tmp_path, 1)
    records, done = open_run(tmp_path), threading.Event()

    def write() -> None:
        try:
            record(tmp_path, [made_step(step) for step in range(2, 60)], after=1)
        finally:
            done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        assert all(same(step, made_step(step.number)) for step in records)  # a warning would be an error here
    writer.join()
    assert records.steps == list(range(1, 60))


def test_a_step_once_read_stays_readable_when_it_is_thinned_away(tmp_path: Path) -> None:
    records = open_run(made_run(tmp_path, 2))
    step = records.step(2).checked()
    record(tmp_path, [], after=1)
    assert records.steps == [1]
    assert same(step, made_step(2))
