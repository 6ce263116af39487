"""What is written is what is read, to the last bit, in few bytes, and by any reader of parquet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers.record.made_records import OPTIONAL, made_run, made_step, record, same
from trimtab.record import SCHEMA, TABLES, RecordError, StepData, open_run
from trimtab.record.layout import encode, open_table, read_columns
from trimtab.record.schema import arrow_schema, required

ODD = [np.nan, np.inf, -np.inf, -0.0, 1e-45, 3.4e38, -1e4, np.float32(0.1)]


def read_back(table: str, values: dict[str, Any]) -> pa.Table:
    file = open_table(table, bytes(encode(table, values)), "here")
    return read_columns(file, list(values), "here")


def floats() -> list[str]:
    return [column.name for column in TABLES["tokens"] if column.type == "float32"]


@pytest.mark.parametrize("name", floats())
def test_every_float_comes_back_with_its_bits(name: str) -> None:
    tokens = dict(made_step(1, [8, 8], optional=OPTIONAL).tokens)
    tokens[name] = np.array([*ODD, *ODD], np.float32)
    back = read_back("tokens", tokens)[name].to_numpy()
    assert back.tobytes() == tokens[name].tobytes()


def test_a_nan_keeps_its_payload() -> None:
    tokens = dict(made_step(1, [2]).tokens)
    tokens["new_logp"] = np.array([0x7FC01234, 0xFFC00001], np.uint32).view(np.float32)
    assert read_back("tokens", tokens)["new_logp"].to_numpy().tobytes() == tokens["new_logp"].tobytes()


@pytest.mark.parametrize("table", ["tokens", "responses"])
def test_no_column_has_nulls_and_types_are_those_of_the_schema(table: str) -> None:
    data = made_step(1, optional=OPTIONAL)
    branches = {"branch": [0] * data.info.responses}
    back = read_back(table, dict(data.tokens) if table == "tokens" else {**data.responses, **branches})
    wanted = arrow_schema(table)
    assert {field.name: field.type for field in back.schema} == {field.name: field.type for field in wanted}
    assert not any(field.nullable for field in back.schema)


def test_optional_columns_are_left_out_where_not_given(tmp_path: Path) -> None:
    step = open_run(made_run(tmp_path, 1)).step(1)
    assert not {*OPTIONAL} & set(step.tokens)
    assert set(required("tokens")) <= set(step.tokens)


def test_all_optional_columns_can_be_there(tmp_path: Path) -> None:
    data = made_step(1, optional=OPTIONAL)
    record(tmp_path, [data])
    assert same(open_run(tmp_path).step(1), data)


def test_a_column_that_is_not_in_the_schema_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown columns.*colour"):
        encode("tokens", {**made_step(1).tokens, "colour": np.zeros(10)})


@pytest.mark.parametrize("name", ["old_logp", "advantage", "reason", "token"])
def test_a_required_column_must_be_given(name: str) -> None:
    tokens = {key: value for key, value in made_step(1).tokens.items() if key != name}
    with pytest.raises(ValueError, match=f"missing columns.*{name}"):
        encode("tokens", tokens)


def test_the_same_step_gives_the_same_bytes() -> None:
    one, other = (encode("tokens", made_step(3, [50] * 20).tokens) for _ in range(2))
    assert bytes(one) == bytes(other), "a resumed run must leave the files of one that was not stopped"


def test_a_token_takes_at_most_forty_bytes_even_where_no_float_repeats() -> None:
    data = made_step(1, [400] * 64, optional=("current_logp",))
    size = len(encode("tokens", data.tokens)) + len(encode("responses", data.responses))
    assert size / data.info.tokens <= 40


def test_what_is_the_same_for_many_tokens_takes_next_to_nothing() -> None:
    data = made_step(1, [400] * 64)
    constant = ("weight", "scale", "clip_low", "clip_high", "segment")
    file = open_table("tokens", bytes(encode("tokens", data.tokens)), "here")
    group = file.metadata.row_group(0)
    sizes = {group.column(n).path_in_schema: group.column(n).total_compressed_size for n in range(group.num_columns)}
    assert sum(sizes[name] for name in constant) / data.info.tokens < 0.05
    assert sizes["response"] / data.info.tokens < 0.1


def test_empty_responses_and_a_step_without_tokens_are_fine(tmp_path: Path) -> None:
    for number, lengths in enumerate([(0, 2, 0, 1), (0, 0)], start=1):
        data = made_step(number, lengths)
        record(tmp_path, [data], after=number - 1)
        assert same(open_run(tmp_path).step(number), data)


def test_any_reader_of_parquet_can_read_the_tables(tmp_path: Path) -> None:
    made_run(tmp_path, 2)
    files = sorted(tmp_path.glob("tokens/step-*/tokens.parquet"))
    table = pa.concat_tables([pq.read_table(file, page_checksum_verification=True) for file in files])
    assert table.num_rows == 20 and "old_logp" in table.column_names


def test_pages_carry_checksums_that_other_readers_can_check(tmp_path: Path) -> None:
    made_run(tmp_path, 1)
    (file,) = tmp_path.glob("tokens/step-*/tokens.parquet")
    data = bytearray(file.read_bytes())
    table = pq.ParquetFile(file).metadata.row_group(0).column(2)
    middle = table.data_page_offset + table.total_compressed_size - 3
    data[middle] ^= 0xFF
    file.write_bytes(bytes(data))
    with pytest.raises(OSError, match=r"(?i)crc|checksum"):
        pq.read_table(file, page_checksum_verification=True)


def test_every_column_says_what_it_means(tmp_path: Path) -> None:
    import json

    made_run(tmp_path, 1)
    written = json.loads((tmp_path / "tokens/manifest.json").read_text())
    assert written["schema"] == SCHEMA
    for name, columns in TABLES.items():
        assert set(written["columns"][name]) == {column.name for column in columns}
        assert all(len(column.meaning) > 8 for column in columns)
        assert len({column.name for column in columns}) == len(columns)


def test_a_table_of_something_else_is_named(tmp_path: Path) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"colour": [1, 2]}), sink)
    with pytest.raises(RecordError, match=r"there\.parquet lacks the columns .*old_logp"):
        open_table("tokens", sink.getvalue().to_pybytes(), "there.parquet")


def test_a_column_of_another_type_is_named() -> None:
    tokens = pa.table({name: np.zeros(3, np.float64) for name in required("tokens")})
    sink = pa.BufferOutputStream()
    pq.write_table(tokens, sink)
    with pytest.raises(RecordError, match="column response is double"):
        open_table("tokens", sink.getvalue().to_pybytes(), "there.parquet")


def test_unknown_columns_of_a_later_version_are_ignored() -> None:
    data: StepData = made_step(1)
    table = read_back("tokens", dict(data.tokens)).append_column("colour", pa.array([1] * data.info.tokens))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    file = open_table("tokens", sink.getvalue().to_pybytes(), "there.parquet")
    assert read_columns(file, ["old_logp"], "there").num_rows == data.info.tokens
