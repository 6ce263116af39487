"""Damaged, half-written and foreign files are named and passed over; they never give numbers."""

from __future__ import annotations

import json
import os
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers.record.made_records import made_run, made_step, readable, same
from helpers.thorough import THOROUGH
from trimtab.record import SCHEMA, TABLES, RecordError, RecordWarning, open_run
from trimtab.record.layout import (
    LARGEST_JSON,
    RECORDS_FOLDER,
    encode,
    json_with_digest,
    open_table,
    read_columns,
    read_json,
    step_folder,
)

FLIPS = 400 if THOROUGH else 60
STEP_FILES = ("tokens.parquet", "responses.parquet", "step.json")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return made_run(tmp_path / "run", 3)


def of_step_two(run: Path, name: str) -> Path:
    return step_folder(run / RECORDS_FOLDER, 2) / name


def assert_only_step_two_is_lost(run: Path, told: str = "") -> None:
    with pytest.warns(RecordWarning) as caught:
        found = {step.number: step for step in open_run(run)}
    assert len(caught) == 1 and str(step_folder(run / RECORDS_FOLDER, 2)) in str(caught[0].message), told
    assert sorted(found) == [1, 3], told
    assert all(same(step, made_step(number)) for number, step in found.items()), told


@pytest.mark.parametrize("name", STEP_FILES)
def test_any_byte_that_is_changed_is_noticed(run: Path, name: str) -> None:
    path = of_step_two(run, name)
    whole, draw = path.read_bytes(), random.Random(name)
    for _ in range(FLIPS):
        data = bytearray(whole)
        place = draw.randrange(len(data))
        data[place] ^= 1 << draw.randrange(8)
        path.write_bytes(bytes(data))
        found = readable(run)
        assert same(found[1], made_step(1)) and same(found[3], made_step(3))
        if 2 in found:  # only where the change says nothing, as white space in JSON
            assert name == "step.json" and same(found[2], made_step(2)), f"byte {place} of {name}"


@pytest.mark.parametrize("name", STEP_FILES)
def test_any_file_that_is_cut_off_is_noticed(run: Path, name: str) -> None:
    path = of_step_two(run, name)
    whole = path.read_bytes()
    for length in sorted({0, 1, 4, len(whole) // 3, len(whole) // 2, len(whole) - 8, len(whole) - 2}):
        path.write_bytes(whole[:length])
        assert_only_step_two_is_lost(run, f"{name} cut to {length} bytes")


@pytest.mark.parametrize("name", STEP_FILES)
def test_a_file_that_is_missing_is_named(run: Path, name: str) -> None:
    of_step_two(run, name).unlink()
    assert_only_step_two_is_lost(run)
    with pytest.raises(RecordError, match=rf"step-00000002/{name} is missing"):
        open_run(run).step(2).checked()


@pytest.mark.parametrize("name", STEP_FILES)
def test_a_pipe_or_a_folder_instead_of_a_file_does_not_block(run: Path, name: str) -> None:
    path = of_step_two(run, name)
    path.unlink()
    os.mkfifo(path)
    assert_only_step_two_is_lost(run)
    path.unlink()
    path.mkdir()
    assert_only_step_two_is_lost(run)


@pytest.mark.parametrize("name", ["tokens.parquet", "responses.parquet"])
def test_the_table_of_another_step_is_noticed(run: Path, name: str) -> None:
    shutil.copy(step_folder(run / RECORDS_FOLDER, 3) / name, of_step_two(run, name))
    assert_only_step_two_is_lost(run)


def test_a_foreign_table_is_noticed(run: Path) -> None:
    pq.write_table(pa.table({"colour": [1, 2, 3]}), of_step_two(run, "tokens.parquet"))
    assert_only_step_two_is_lost(run)


def test_a_foreign_table_with_the_right_sum_is_noticed_by_its_columns_and_rows(run: Path) -> None:
    from trimtab.record.layout import digest, read_step, step_text

    info, files = read_step(run / RECORDS_FOLDER, 2)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"colour": [1, 2, 3]}), sink)
    for data, words in (
        (sink.getvalue().to_pybytes(), "lacks the columns"),
        (bytes(encode("tokens", made_step(2, [5]).tokens)), "5 rows instead of 10"),
    ):
        of_step_two(run, "tokens.parquet").write_bytes(data)
        text = step_text(info, {**files, "tokens.parquet": digest(data)})
        of_step_two(run, "step.json").write_text(text)
        with pytest.raises(RecordError, match=words):
            _ = open_run(run).step(2).tokens


def test_a_table_of_more_rows_than_its_bytes_can_hold_is_not_read_into_memory() -> None:
    rows = 1_200_000
    small = encode("vocabulary", {"text": [b"a"] * rows, "special": [False] * rows})
    with pytest.raises(RecordError, match=r"vocabulary has 1,200,000 rows in [\d,]+ bytes: no run has recorded that"):
        open_table("vocabulary", bytes(small), "vocabulary")


def test_a_text_that_stands_in_every_row_is_not_read_into_memory() -> None:
    texts = encode("vocabulary", {"text": [b"a" * 1_000_000] * 300, "special": [False] * 300})
    with pytest.raises(RecordError, match=r"vocabulary has 300,0\d\d,\d\d\d bytes of values in [\d,]+ bytes"):
        open_table("vocabulary", bytes(texts), "vocabulary")
    columns = {column.name: ["" if column.type == "string" else 0] * 300 for column in TABLES["responses"]}
    columns |= {"finished": [True] * 300, "answer": ["a" * 1_000_000] * 300}
    data = bytes(encode("responses", columns))
    assert len(data) < 100_000
    file = open_table("responses", data, "step")
    assert read_columns(file, ["reward"], "step", len(data)).num_rows == 300
    with pytest.raises(RecordError, match=r"step has 300,000,000 bytes of values in [\d,]+ bytes"):
        read_columns(file, ["answer"], "step", len(data))


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_text("{}"),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text("null"),
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_text(json_with_digest({"schema": SCHEMA, "step": 2})),
        lambda path: path.write_text(json_with_digest({"schema": SCHEMA, "colour": "red"})),
        lambda path: path.write_text(json_with_digest({**read_json(path), "updates": 3})),
        lambda path: path.write_text(json_with_digest({**read_json(path), "updates": [{"colour": 1}]})),
        lambda path: path.write_text(json_with_digest({**read_json(path), "files": []})),
        lambda path: path.write_text(json_with_digest({**read_json(path), "files": {}})),
        lambda path: path.write_text(json_with_digest({**read_json(path), "schema": "one"})),
        lambda path: path.write_bytes(b"\xff\xfe\x00"),
        lambda path: os.truncate(path, LARGEST_JSON + 1),
    ],
)
def test_a_steps_json_that_is_something_else_is_named(run: Path, write: Callable[[Path], object]) -> None:
    write(of_step_two(run, "step.json"))
    assert_only_step_two_is_lost(run)


def test_a_number_changed_by_hand_is_noticed(run: Path) -> None:
    path = of_step_two(run, "step.json")
    table = json.loads(path.read_text())
    table["observed_entropy"] += 1e-9
    path.write_text(json.dumps(table))
    with pytest.raises(RecordError, match="is damaged"):
        open_run(run).step(2)


@pytest.mark.parametrize("where", ["manifest.json", "step.json"])
def test_a_later_schema_is_refused(run: Path, where: str) -> None:
    path = run / RECORDS_FOLDER / where if where == "manifest.json" else of_step_two(run, where)
    path.write_text(json_with_digest({**read_json(path), "schema": SCHEMA + 1}))
    with pytest.raises(RecordError, match=f"schema {SCHEMA + 1}; this trimtab reads up to {SCHEMA}: use a newer one"):
        open_run(run).step(2)


def test_a_manifest_that_is_damaged_or_foreign_is_named(run: Path) -> None:
    path = run / RECORDS_FOLDER / "manifest.json"
    whole = path.read_text()
    for text in ("", "{", "[]", whole[:-40], whole.replace("dapo", "grpo"), json_with_digest({"schema": 1}), "\x00"):
        path.write_text(text)
        with pytest.raises(RecordError, match=r"manifest\.json"):
            open_run(run)


def test_a_damaged_vocabulary_gives_no_text_but_leaves_the_numbers(run: Path) -> None:
    path = run / RECORDS_FOLDER / "vocabulary.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))
    step = open_run(run).step(1)
    assert same(step, made_step(1))
    with pytest.raises(RecordError, match=r"vocabulary\.parquet is damaged"):
        step.text(0)


def test_other_files_among_the_records_are_ignored(run: Path) -> None:
    folder = run / RECORDS_FOLDER
    for name in ("step-1", "step-abc", "step-00000001x", ".writing-00000009", "notes", "step-99999999999999"):
        (folder / name).mkdir()
    (folder / "readme.txt").write_text("hello")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [step.number for step in open_run(run)] == [1, 2, 3]


def test_an_empty_or_strange_folder_of_a_step_is_named(run: Path) -> None:
    shutil.rmtree(step_folder(run / RECORDS_FOLDER, 2))
    step_folder(run / RECORDS_FOLDER, 2).mkdir()
    assert_only_step_two_is_lost(run)
    step_folder(run / RECORDS_FOLDER, 2).rmdir()
    step_folder(run / RECORDS_FOLDER, 2).write_text("a file")
    assert_only_step_two_is_lost(run)
