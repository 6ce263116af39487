"""The benchmarks: what is read, from where, and how a bad file is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trimtab.data.benchmarks import BENCHMARKS, DEFAULT_BENCHMARKS, PROMPT_SUFFIX, load_benchmark
from trimtab.experiments.evaluate import EvalOptions, run
from trimtab.experiments.evaluate.settings import with_benchmarks

DATA = Path(__file__).parents[2].parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the shared data is not here")


def row(question: str = "1+1?", answer: Any = "2", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"prompt": messages, "reward_model": {"ground_truth": answer}, "data_source": "AIME24", **fields}


def write(folder: Path, *rows: dict[str, Any], name: str = "aime24.jsonl") -> Path:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@needs_data
@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_is_read_whole(name: str) -> None:
    questions = load_benchmark(name, DATA)
    assert len(questions) == BENCHMARKS[name].size
    assert len({question.id for question in questions}) == len(questions)
    for question in questions:
        assert question.problem.prompt[-1]["content"].endswith(PROMPT_SUFFIX)
        assert question.problem.rule == "math"
        assert question.problem.answer.strip()


@needs_data
def test_a_question_knows_its_row() -> None:
    question = load_benchmark("aime24", DATA)[3]
    assert question.id == "AIME24-3"
    assert question.location.endswith("aime24.parquet, row 4")
    assert question.problem.answer == r"\boxed{385}"


@needs_data
@pytest.mark.parametrize("name", ["aime24", "amc23", "gsm8k"])
def test_a_response_with_the_answer_in_a_box_is_right(name: str) -> None:
    questions = load_benchmark(name, DATA)[:20]
    assert run.rejected_truths(questions, "boxed") == []


def test_the_six_are_sampled_as_the_papers_do() -> None:
    assert with_benchmarks(EvalOptions(model="some/model")).benchmarks == ",".join(DEFAULT_BENCHMARKS)
    assert DEFAULT_BENCHMARKS == ("aime24", "aime25", "amc23", "math500", "minerva", "olympiadbench")
    assert [BENCHMARKS[name].samples for name in DEFAULT_BENCHMARKS] == [32, 32, 32, 4, 4, 4]


def test_jsonl_of_the_same_schema_will_do(tmp_path: Path) -> None:
    questions = load_benchmark("aime24", write(tmp_path, row(extra_info={"index": "A-1"}), row("2+2?", 4)), " Box it.")
    assert [question.id for question in questions] == ["aime24-0", "aime24-1"], "not every row has a name"
    assert questions[1].problem.prompt == ({"role": "user", "content": "2+2? Box it."},)
    assert questions[1].problem.answer == "4"


def test_problems_go_by_the_names_their_file_gives(tmp_path: Path) -> None:
    named = write(tmp_path, row(extra_info={"index": "X"}), row("3?", "3", extra_info={"index": 7}))
    assert [question.id for question in load_benchmark("aime24", named)] == ["X", "7"]
    twice = write(tmp_path, row(extra_info={"index": "X"}), row("3?", "3", extra_info={"index": "X"}))
    assert [question.id for question in load_benchmark("aime24", twice)] == ["aime24-0", "aime24-1"]


def test_blank_lines_shift_no_row_number(tmp_path: Path) -> None:
    path = tmp_path / "aime24.jsonl"
    path.write_text(json.dumps(row()) + "\n\n" + json.dumps(row("3?", "3")) + "\n")
    assert [question.location for question in load_benchmark("aime24", tmp_path)] == [
        f"{path}, row 1",
        f"{path}, row 3",
    ]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"prompt": "1+1?"}, "there is no `reward_model`"),
        ({"reward_model": {"ground_truth": "2"}}, "there is no `prompt`"),
        (row(answer=""), "`reward_model.ground_truth` is empty"),
        (row(answer=None), "`reward_model.ground_truth` is empty"),
        (row(answer=r"\frac{1}{2"), "unbalanced braces"),
        (row(answer="}{"), "unbalanced braces"),
        (row(answer=r"\boxed{}"), "is empty"),
        (row(answer=" $ . $ "), "is empty"),
        (row(answer=["2"]), "`reward_model.ground_truth` is list"),
        (row(question="  "), "`prompt.content`"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path: Path, bad: dict[str, Any], words: str) -> None:
    write(tmp_path, row(), bad)
    with pytest.raises(ValueError, match="row 2") as error:
        load_benchmark("aime24", tmp_path)
    assert f"{tmp_path / 'aime24.jsonl'}, row 2" in str(error.value)
    assert words in str(error.value)


@pytest.mark.parametrize("answer", [r"\{1, 2\}", r"\emptyset", "∅", r"\text{(A)}", r"x \\ y", "0", r"\left\{3\right."])
def test_answers_that_look_odd_are_answers(tmp_path: Path, answer: str) -> None:
    assert load_benchmark("aime24", write(tmp_path, row(answer=answer)))[0].problem.answer == answer


@pytest.mark.parametrize(
    ("answer", "words"),
    [("42", "GSM8K writes the result after ####"), ("#### ", "####"), ("#### six", "is not a number")],
)
def test_a_gsm8k_row_without_a_number_is_named(tmp_path: Path, answer: str, words: str) -> None:
    write(tmp_path, {"question": "How many?", "answer": answer}, name="gsm8k_test.jsonl")
    with pytest.raises(ValueError, match=r"gsm8k_test\.jsonl, row 1") as error:
        load_benchmark("gsm8k", tmp_path)
    assert words in str(error.value)


def test_a_missing_file_is_named_with_its_names(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"MATH500 is not in .*: none of math500\.parquet, math500\.jsonl"):
        load_benchmark("math500", tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        load_benchmark("math500", tmp_path / "nowhere")


def test_without_pyarrow_a_parquet_file_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "aime24.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match="needs the package pyarrow"):
        load_benchmark("aime24", tmp_path)


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "aime24.parquet").write_bytes(b"not at all")
    with pytest.raises(ValueError, match=r"aime24\.parquet: not a readable parquet file"):
        load_benchmark("aime24", tmp_path)


class Hub(ModuleType):
    """A stand-in for `datasets` that remembers what was asked of it."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        super().__init__("datasets")
        self.rows, self.asked = rows, []  # type: ignore[var-annotated]

    def load_dataset(self, source: str, config: str | None, split: str) -> list[dict[str, Any]]:
        self.asked.append((source, config, split))
        return self.rows


def test_without_a_folder_benchmarks_come_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub([{"problem": "1+1?", "solution": r"\boxed{2}"}])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    (question,) = load_benchmark("aime24")
    assert set(hub.asked) == {("math-ai/aime24", None, "test")}
    assert question.problem.prompt[0]["content"] == "1+1?" + PROMPT_SUFFIX
    assert question.problem.answer == r"\boxed{2}"
    assert question.location == "math-ai/aime24[test], row 1"


def test_answers_that_the_hub_lists_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", Hub([{"question": "Roots?", "final_answer": ["1", "$-1$"]}]))
    assert load_benchmark("olympiadbench")[0].problem.answer == "1, $-1$"


@pytest.mark.parametrize(
    "bad", [{"question": "Roots?"}, {"question": "Roots?", "final_answer": []}, {"final_answer": ["1"]}]
)
def test_a_data_set_of_the_hub_that_has_changed_is_named(bad: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", Hub([bad]))
    with pytest.raises(ValueError, match=r"math-ai/olympiadbench\[test\], row 1"):
        load_benchmark("olympiadbench")


def test_gsm8k_on_the_hub_has_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub([{"question": "How many?", "answer": "#### 3"}])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert load_benchmark("gsm8k")[0].problem.answer == "3"
    assert set(hub.asked) == {("openai/gsm8k", "main", "test")}


def test_without_datasets_the_hub_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="needs the package datasets"):
        load_benchmark("aime24")
