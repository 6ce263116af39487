"""Tasks from files: what is read, and how a bad row is named."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trimtab.data import build_task, gsm8k, read_file, read_rows, worked_solutions
from trimtab.data.files import BOXED_SUFFIX

DATA = Path(__file__).parents[2].parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the shared data is not here")
GOOD = {"prompt": "1+1?", "reward_model": {"ground_truth": "2"}}


def write(folder: Path, *rows: Any, name: str = "mine.jsonl") -> str:
    path = folder / name
    path.write_text("".join(row + "\n" if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


def test_a_row_in_verls_schema_becomes_a_problem(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    row = {**GOOD, "prompt": messages, "data_source": "sums", "extra_info": {"index": 3}}
    task = read_file(write(tmp_path, row), suffix=" Box it.")
    assert task.name == "mine"
    assert task[0].prompt == (messages[0], {"role": "user", "content": "1+1? Box it."})
    assert (task[0].answer, task[0].rule, task[0].source, task[0].extra) == ("2", "boxed", "sums", {"index": 3})


def test_a_prompt_may_be_text_and_an_answer_a_number(tmp_path: Path) -> None:
    task = read_file(write(tmp_path, {"prompt": "½ + ½?", "reward_model": {"ground_truth": 1}}), rule="number")
    assert task[0].prompt == ({"role": "user", "content": "½ + ½?"},)
    assert (task[0].answer, task[0].rule, task[0].source) == ("1", "number", "mine")


def test_parquet_is_read_like_jsonl(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{**GOOD, "prompt": [{"role": "user", "content": f"{n}?"}], "extra_info": {"n": n}} for n in range(3)]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "mine.parquet")
    assert read_file(str(tmp_path / "mine.parquet")) == read_file(write(tmp_path, *rows))


def test_columns_go_by_the_names_given(tmp_path: Path) -> None:
    source = write(tmp_path, {"q": "1+1?", "a": "2", "how": "Count."})
    problem = read_file(source, columns={"prompt": "q", "answer": "a", "solution": "how"}, suffix=" Box it.")[0]
    assert problem.prompt[0]["content"] == "1+1? Box it."
    assert (problem.answer, problem.solution) == ("2", "Count.")


def test_a_gsm8k_row_becomes_a_problem_with_a_worked_solution(tmp_path: Path) -> None:
    source = write(tmp_path, {"question": "How many?", "answer": "500*2 = <<500*2=1000>>1000.\n#### 1,000"})
    problem = gsm8k(source)[0]
    assert problem.prompt[0]["content"] == "How many?" + BOXED_SUFFIX
    assert (problem.answer, problem.solution) == ("1000", "500*2 = 1000.\nThe answer is \\boxed{1000}.")


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r\n\r\n" + json.dumps(GOOD).encode())
    assert len(read_file(str(path))) == 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"reward_model": {"ground_truth": "2"}}, "there is no `prompt`, only `reward_model`"),
        ({**GOOD, "prompt": None}, "`prompt` is empty"),
        ({**GOOD, "prompt": " "}, "`prompt` is str ' '; it must be text, and not empty"),
        ({**GOOD, "prompt": []}, "`prompt` is list []"),
        ({**GOOD, "prompt": 5}, "`prompt` is int 5"),
        ({**GOOD, "prompt": ["1+1?"]}, "a chat message of `prompt` is str '1+1?'"),
        ({**GOOD, "prompt": [{"role": "user"}]}, "there is no `prompt.content`, only `role`"),
        ({**GOOD, "prompt": [{"role": "user", "content": None}]}, "`prompt.content` is empty"),
        ({**GOOD, "prompt": [{"role": 1, "content": "?"}]}, "`prompt.role` is int 1"),
        ({**GOOD, "prompt": "\ud800"}, "`prompt` has a lone surrogate"),
        ({"prompt": "1+1?"}, "there is no `reward_model`, only `prompt`"),
        ({**GOOD, "reward_model": "2"}, "`reward_model` is str '2'"),
        ({**GOOD, "reward_model": {}}, "no `reward_model.ground_truth`: `reward_model` is an empty object; name"),
        ({"x\nforged: \x1b[2J": 1}, r"there is no `prompt`, only `x\nforged: \x1b[2J`"),
        ({}, "there is no `prompt`: the row is an empty object; name your columns"),
        ({**GOOD, "reward_model": {"ground_truth": ""}}, "`reward_model.ground_truth` is empty"),
        ({**GOOD, "reward_model": {"ground_truth": None}}, "`reward_model.ground_truth` is empty"),
        ({**GOOD, "reward_model": {"ground_truth": ["2"]}}, "`reward_model.ground_truth` is list ['2']"),
        ({**GOOD, "reward_model": {"ground_truth": True}}, "`reward_model.ground_truth` is bool True"),
        ({**GOOD, "reward_model": {"ground_truth": float("nan")}}, "`reward_model.ground_truth` is float nan"),
        ({**GOOD, "data_source": 3}, "`data_source` is int 3"),
        ({**GOOD, "extra_info": "x"}, "`extra_info` is str 'x'"),
        ('{"prompt": ', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1, 2]", "must be a JSON object, not list [1, 2]"),
    ],
)
def test_a_bad_row_is_named_by_file_and_number(tmp_path: Path, bad: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read_file(write(tmp_path, GOOD, bad, GOOD))
    assert str(error.value).startswith(f"{tmp_path / 'mine.jsonl'}, row 2: ")


EMPTY = {**GOOD, "prompt": ""}
NUMBER = {**GOOD, "data_source": 3}


def test_all_bad_rows_of_a_file_are_in_one_error(tmp_path: Path) -> None:
    source = write(tmp_path, GOOD, EMPTY, '{"prompt": ', GOOD, EMPTY, NUMBER)
    with pytest.raises(ValueError, match="cannot be used") as error:
        read_file(source)
    lines = str(error.value).splitlines()
    assert sorted(line.removeprefix(f"{source}, ") for line in lines[:-1]) == [
        "row 3: not JSON (Expecting value: line 2 column 1 (char 12)); mend or remove the row",
        "row 6: `data_source` is int 3; it must be text",
        "rows 2, 5: `prompt` is empty; it must be text, and not empty",
    ]
    assert lines[-1] == "4 of 6 rows cannot be used: mend or remove them"


def test_of_thousands_of_bad_rows_the_first_are_named_and_all_counted(tmp_path: Path) -> None:
    others = [{**GOOD, "data_source": number} for number in range(7)]
    with pytest.raises(ValueError, match="cannot be used") as error:
        read_file(write(tmp_path, *[EMPTY] * 2_000, *others, GOOD))
    lines = str(error.value).splitlines()
    assert "rows 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 1,990 more: `prompt` is empty" in lines[0]
    assert lines[-2] == "and 3 more rows for other reasons"
    assert lines[-1].startswith("2,007 of 2,008 rows cannot be used")


def test_bad_rows_are_left_out_where_the_recipe_says_so(tmp_path: Path) -> None:
    source = write(tmp_path, GOOD, EMPTY, "[1, 2]", {**GOOD, "prompt": "1+2?"})
    arguments = {"path": source, "columns": {}}
    with pytest.raises(ValueError, match=r"or leave them out with task\.skip_bad_rows = true$"):
        build_task("file", arguments, "train", 10)
    with pytest.warns(UserWarning, match=r"^2 of 4 rows are left out \(task.skip_bad_rows = true\):") as warned:
        task = build_task("file", {**arguments, "skip_bad_rows": True}, "train", 10)
    assert task is not None
    assert [problem.prompt[0]["content"] for problem in (task[0], task[1])] == ["1+1?", "1+2?"]
    assert len(task) == 2
    assert len(warned) == 1
    assert "row 2: `prompt` is empty" in str(warned[0].message)
    assert "row 3: must be a JSON object" in str(warned[0].message)


def test_a_file_with_bad_rows_alone_is_an_error_even_then(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"2 of 2 rows cannot be used: mend or remove them$"):
        read_file(write(tmp_path, EMPTY, EMPTY), skip_bad_rows=True)


def test_bad_rows_of_gsm8k_may_be_left_out_too(tmp_path: Path) -> None:
    source = write(tmp_path, {"question": "?", "answer": "#### 5"}, {"question": "?", "answer": "five"})
    with pytest.warns(UserWarning, match="1 of 2 rows are left out"):
        task = build_task("gsm8k", {"path": source, "skip_bad_rows": True}, "train", 10)
    assert task is not None
    assert len(task) == 1


def test_all_bad_rows_of_a_warm_starts_file_are_in_one_error(tmp_path: Path) -> None:
    row = {"prompt": "1+1?", "solution": "2"}
    source = write(tmp_path, row, {**row, "solution": ""}, {**row, "solution": ""})
    with pytest.raises(ValueError, match=r"rows 2, 3: `solution` is empty.*; 2 of 3 rows cannot be used"):
        worked_solutions(source, "", {})


def test_a_long_value_is_cut_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be an object") as error:
        read_file(write(tmp_path, {**GOOD, "reward_model": "x" * 10_000}))
    assert len(str(error.value)) < len(str(tmp_path)) + 200


def test_bytes_that_are_not_utf8_are_named_by_row(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"prompt": "\xff"}\n')
    with pytest.raises(ValueError, match=r"row 2: not JSON \(byte 13 is not UTF-8\)"):
        read_file(str(path))


@pytest.mark.parametrize("answer", ["It is 5.", "It is 5.\n####  ", 5, None])
def test_a_gsm8k_row_without_a_result_is_named(tmp_path: Path, answer: object) -> None:
    with pytest.raises(ValueError, match="row 1: `answer` is"):
        gsm8k(write(tmp_path, {"question": "How many?", "answer": answer}))


def test_a_column_may_lie_inside_an_object_or_have_a_dot_in_its_name(tmp_path: Path) -> None:
    row = {
        "item": {"question": "1+1?", "result": {"value": 2}},
        "task.kind": "sums",
        "note": {"n": 1},
        "who": "Be brief.",
    }
    columns = {"prompt": "item.question", "answer": "item.result.value", "source": "task.kind", "extra": "note"}
    problem = read_file(write(tmp_path, row), columns={**columns, "system": "who"})[0]
    assert problem.prompt == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"})
    assert (problem.answer, problem.source, problem.extra) == ("2", "sums", {"n": 1})


def test_a_column_that_the_recipe_names_is_never_missing(tmp_path: Path) -> None:
    source = write(tmp_path, {"question": "?", "answer": "1"})
    for part in ("answer", "source", "extra", "solution", "system"):
        columns = {"prompt": "question", "answer": "answer", part: "result"}
        with pytest.raises(ValueError, match="there is no `result`, only `question`, `answer`; name your"):
            read_file(source, columns=columns)


def test_an_unknown_column_of_a_problem_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no problem has a 'promt': did you mean prompt"):
        read_file(write(tmp_path, GOOD), columns={"promt": "q"})
    with pytest.raises(ValueError, match="prompt = '': name a column of the file, or leave it out"):
        read_file(write(tmp_path, GOOD), columns={"prompt": ""})


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_file_without_rows_is_an_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"empty.jsonl' has no rows"):
        read_file(str(path))


def test_a_parquet_file_that_is_none_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "mine.parquet"
    path.write_text("not parquet")
    with pytest.raises(ValueError, match=r"mine.parquet: not a readable parquet file"):
        read_file(str(path))


@pytest.mark.parametrize(
    "source", ["nowhere.jsonl", "no/where.parquet", "/no/where", "./where", "~/no such file", "x.json"]
)
def test_a_missing_file_is_an_error(source: str) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        read_file(source)


def test_another_kind_of_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ends in '.csv': write it as .jsonl or .parquet"):
        read_file(write(tmp_path, GOOD, name="mine.csv"))


def test_a_hub_name_without_datasets_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"'someone/data-1.0' is not a file.*datasets: .*pip install .*\[hub\]'"):
        read_file("someone/data-1.0")


def test_a_hub_name_is_loaded_with_its_config_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    class Datasets:
        @staticmethod
        def load_dataset(name: str, config: str | None, *, split: str) -> list[dict[str, str]]:
            asked.append((name, config, split))
            return [{"question": "How many?", "answer": "#### 5"}, {"question": "How many?", "answer": "five"}]

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    with pytest.raises(ValueError, match=r"openai/gsm8k\[test\], row 2"):
        gsm8k(split="test")
    assert asked == [("openai/gsm8k", "main", "test")]


def test_a_data_set_that_cannot_be_loaded_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    class Datasets:
        @staticmethod
        def load_dataset(name: str, config: str | None, *, split: str) -> None:
            raise RuntimeError("Dataset scripts are no longer supported,\nbut found \x1b[1mtrap.py")

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    words = (
        "the data set 'some/trap' cannot be loaded: RuntimeError: Dataset scripts are no longer supported, but found "
    )
    with pytest.raises(ValueError, match=words) as error:
        read_file("some/trap")
    assert "\x1b" not in str(error.value)


@needs_data
@pytest.mark.parametrize(
    ("name", "size"),
    [("aime24", 30), ("aime25", 30), ("amc23", 40), ("math500", 500), ("minerva", 272), ("olympiadbench", 674)],
)
def test_the_benchmarks_load(name: str, size: int) -> None:
    pytest.importorskip("pyarrow")
    task = read_file(str(DATA / f"{name}.parquet"))
    assert len(task) == size
    assert all(problem.prompt[-1]["content"] and problem.answer for problem in task.problems)


@needs_data
@pytest.mark.parametrize(("name", "size"), [("gsm8k_train", 7473), ("gsm8k_test", 1319)])
def test_gsm8k_loads(name: str, size: int) -> None:
    task = gsm8k(str(DATA / f"{name}.jsonl"))
    assert len(task) == size
    assert all(re.fullmatch(r"-?\d+(\.\d+)?", problem.answer) for problem in task.problems)
    assert not any("<<" in (problem.solution or "") for problem in task.problems)


@needs_data
def test_the_math_problems_load_by_their_columns() -> None:
    source = str(DATA / "math_train.jsonl")
    with pytest.raises(ValueError, match=r"rows 887, .*: `answer` is empty.*; 4 of 7,474 rows cannot be used"):
        read_file(source, columns={"prompt": "problem", "answer": "answer"})
    unnamed = r"rows 1, 2, .*: there is no `prompt`, only `problem`, `answer`.*task.columns"
    with pytest.raises(ValueError, match=unnamed):
        read_file(source)


def test_a_number_of_four_thousand_digits_is_an_answer(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"question": "?", "answer": ' + "7" * 4_000 + "}\n")
    assert read_file(str(path), columns={"prompt": "question", "answer": "answer"})[0].answer == "7" * 4_000


# --- hostile parquet


def parquet_file(path: Path, **columns: Any) -> str:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table(columns), path)
    return str(path)


def repeated(values: list[Any], indices: list[int | None] | list[int]) -> Any:
    arrow = pytest.importorskip("pyarrow")
    return arrow.DictionaryArray.from_arrays(arrow.array(indices, arrow.int32()), arrow.array(values))


@pytest.mark.parametrize("inside", [False, True])
def test_a_small_file_of_gigabytes_of_text_is_refused_with_little_memory(tmp_path: Path, inside: bool) -> None:
    arrow = pytest.importorskip("pyarrow")
    prompts = repeated(["x" * 1_000_000], [0] * 20_000)
    if inside:
        prompts = arrow.ListArray.from_arrays(range(20_001), arrow.StructArray.from_arrays([prompts], ["content"]))
    source = parquet_file(tmp_path / "bomb.parquet", prompt=prompts)
    assert Path(source).stat().st_size < 200_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"bomb\.parquet: its rows have more than 256 MB, and the file"):
        read_file(source)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 << 10


def zeros(length: int, rows: int) -> Any:
    arrow = pytest.importorskip("pyarrow")
    return repeated([b"0" * length], [0] * rows).cast(arrow.binary(length))


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda arrow: arrow.array(["x" * 300_000_000]), {"compression": "zstd", "use_dictionary": False}),
        (lambda arrow: zeros(1_000_000, 300), {"compression": "zstd"}),
        (
            lambda arrow: arrow.array(["x" * 1_000_000] * 300),
            {"use_dictionary": False, "column_encoding": "DELTA_BYTE_ARRAY"},
        ),
    ],
    ids=["one text", "fixed length", "shared beginnings"],
)
def test_no_encoding_makes_a_small_file_large_in_memory(make: Any, options: dict[str, Any], tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    code = "import resource, sys; from trimtab.data.files import read_file; "
    code += "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
    parquet.write_table(arrow.table({"prompt": make(arrow)}), tmp_path / "bomb.parquet", **options)
    code += f"try: read_file({str(tmp_path / 'bomb.parquet')!r})\nexcept ValueError as error: print(error)\n"
    code += "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    error, megabytes = done.stdout.splitlines()
    assert "bomb.parquet: its rows have more than 256 MB" in error
    assert int(megabytes) < 400


def test_a_repetitive_file_is_read_as_it_is(tmp_path: Path) -> None:
    answers = repeated(["1", "2"], [0, 1, 0, None])
    source = parquet_file(tmp_path / "mine.parquet", q=repeated(["ä?", "b?"], [0, 1, 1, 0]), a=answers)
    rows = [row for _, row in read_rows(source)]
    assert rows == [{"q": "ä?", "a": "1"}, {"q": "b?", "a": "2"}, {"q": "b?", "a": "1"}, {"q": "ä?", "a": None}]


def test_texts_that_share_their_beginnings_are_read(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [f"What is {number} + 1?" for number in range(3000)]
    options = {"use_dictionary": False, "column_encoding": {"prompt": "DELTA_BYTE_ARRAY"}}
    parquet.write_table(arrow.table({"prompt": texts, "n": list(range(3000))}), tmp_path / "mine.parquet", **options)
    assert [row["prompt"] for _, row in read_rows(str(tmp_path / "mine.parquet"))] == texts


def test_text_in_parquet_that_is_not_utf8_is_named_by_row(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    texts = arrow.array([b"1+1?", b"1+\xff?", b"1+3?"]).view(arrow.string())
    source = parquet_file(tmp_path / "mine.parquet", q=texts, a=["2", "3", "4"])
    columns = {"prompt": "q", "answer": "a"}
    with pytest.raises(ValueError, match=r"mine\.parquet, row 2: text that is not UTF-8 \(byte 3 of it\)"):
        read_file(source, columns=columns)
    with pytest.warns(UserWarning, match="1 of 3 rows are left out"):
        assert len(read_file(source, columns=columns, skip_bad_rows=True)) == 2
