"""Tasks from files: verl's schema, plain columns, and GSM8K, from a jsonl or parquet file or by name from the hub.

verl's schema is `prompt` (chat messages, or text), `reward_model.ground_truth`, `data_source`, `extra_info`. A bad
row is named by file and row number, and nothing is dropped or mended silently.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trimtab.tasks.problems import FixedTask, Message, Problem, optional_module, user

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."

Row = Mapping[str, Any]
Rows = Iterable[tuple[str, Row]]


def verl_file(
    source: str, rule: str = "boxed", suffix: str = "", split: str = "train", config: str | None = None
) -> FixedTask:
    """The problems of a file in verl's schema. `suffix` is added to the last message of each prompt."""
    name = Path(source).stem
    return _task(
        name, source, (_verl_problem(at, row, name, rule, suffix) for at, row in read_rows(source, split, config))
    )


def plain_file(
    source: str,
    question: str = "question",
    answer: str = "answer",
    solution: str | None = None,
    rule: str = "boxed",
    suffix: str = BOXED,
    skip_unanswered: bool = False,
    split: str = "train",
    config: str | None = None,
) -> FixedTask:
    """The problems of a file with a column for the question and one for the answer, by the names given.

    `solution` names a column of worked solutions, where there is one. A row whose answer is empty is an error, or with
    `skip_unanswered` left out.
    """

    def problem(at: str, row: Row) -> Problem:
        prompt = user(_text(at, row, question) + suffix)
        worked = _text(at, row, solution) if solution else None
        return Problem(prompt, _truth(at, row, answer), rule, name, solution=worked)

    def skipped(at: str, row: Row) -> bool:
        return skip_unanswered and _column(at, row, answer) in (None, "")

    name = Path(source).stem
    return _task(
        name, source, (problem(at, row) for at, row in read_rows(source, split, config) if not skipped(at, row))
    )


def gsm8k(
    source: str = "openai/gsm8k", suffix: str = BOXED, split: str = "train", config: str | None = "main"
) -> FixedTask:
    """GSM8K: `question`, and `answer` with the result after `####`."""
    return _task("gsm8k", source, (_gsm8k_problem(at, row, suffix) for at, row in read_rows(source, split, config)))


def read_rows(source: str, split: str = "train", config: str | None = None) -> Iterator[tuple[str, Row]]:
    """(where it is, the row) for every row of a jsonl or parquet file, or of a data set of the hub.

    `split` and `config` choose within a data set of the hub; a file has neither.
    """
    path = Path(source).expanduser()
    if path.is_file():
        readers = {".jsonl": _jsonl, ".parquet": _parquet}
        if path.suffix not in readers:
            raise ValueError(f"task file {source!r} ends in {path.suffix!r}: write it as .jsonl or .parquet")
        return readers[path.suffix](path)
    if path.suffix in (".jsonl", ".json", ".parquet") or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", source):
        raise ValueError(f"task file {source!r} is not there: give the path of a .jsonl or .parquet file")
    return _hub(source, split, config)


def _jsonl(path: Path) -> Iterator[tuple[str, Row]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            at = f"{path}, row {number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{at}: not UTF-8 (byte {error.start + 1} of the row); save the file as UTF-8"
                ) from None
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{at}: not JSON ({error}); mend or remove the row") from None
            if not isinstance(row, dict):
                raise ValueError(f"{at}: a row must be a JSON object, this is {_shown(row)}")
            yield at, row


def _parquet(path: Path) -> Iterator[tuple[str, Row]]:
    parquet = optional_module("pyarrow.parquet", f"reading {path}", "pyarrow")
    try:
        table = parquet.read_table(path)
    except (ValueError, OSError) as error:  # pyarrow's own errors are kinds of these
        raise ValueError(f"{path}: not a parquet file that can be read ({error}); write it anew") from None
    for number, row in enumerate(table.to_pylist(), start=1):
        yield f"{path}, row {number}", row


def _hub(source: str, split: str, config: str | None) -> Iterator[tuple[str, Row]]:
    purpose = f"{source!r} is no file here, and to load it from the hub one"
    data = optional_module("datasets", purpose, "datasets").load_dataset(source, config, split=split)
    for number, row in enumerate(data, start=1):
        yield f"{source}[{split}], row {number}", row


def _task(name: str, source: str, problems: Iterable[Problem]) -> FixedTask:
    task = FixedTask(name, tuple(problems))
    if not task.problems:
        raise ValueError(f"task file {source!r} has no rows: give one with problems")
    return task


def _verl_problem(at: str, row: Row, name: str, rule: str, suffix: str) -> Problem:
    prompt = _messages(at, row)
    graded = _column(at, row, "reward_model")
    if not isinstance(graded, Mapping):
        raise ValueError(f"{at}: `reward_model` is {_shown(graded)}; it must be an object with `ground_truth`")
    truth = _truth(at, graded, "ground_truth", "reward_model.")
    source, extra = row.get("data_source"), row.get("extra_info")
    if not isinstance(source, str | None):
        raise ValueError(f"{at}: `data_source` is {_shown(source)}; it must be text")
    if not isinstance(extra, Mapping | None):
        raise ValueError(f"{at}: `extra_info` is {_shown(extra)}; it must be an object")
    last = prompt[-1]
    asked = (*prompt[:-1], {**last, "content": last["content"] + suffix})
    return Problem(asked, truth, rule, source or name, extra=extra or {})


def _messages(at: str, row: Row) -> tuple[Message, ...]:
    prompt = _column(at, row, "prompt")
    if isinstance(prompt, str):
        return user(_text(at, row, "prompt"))
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"{at}: `prompt` is {_shown(prompt)}; it must be text or a list of chat messages")
    for message in prompt:
        if not isinstance(message, Mapping):
            raise ValueError(
                f"{at}: a chat message of `prompt` is {_shown(message)}; it must have `role` and `content`"
            )
    return tuple({key: _text(at, message, key, "prompt.") for key in ("role", "content")} for message in prompt)


def _gsm8k_problem(at: str, row: Row, suffix: str) -> Problem:
    question, worked = _text(at, row, "question"), _text(at, row, "answer")
    working, mark, result = worked.rpartition("####")
    result = result.strip().replace(",", "")
    if not mark or not result:
        raise ValueError(f"{at}: `answer` is {_shown(worked)}; GSM8K writes the result after ####")
    working = re.sub(r"<<[^<>]*>>", "", working).strip()  # notes for a calculator
    return Problem(
        user(question + suffix), result, "boxed", "gsm8k", solution=f"{working}\nThe answer is \\boxed{{{result}}}."
    )


def _column(at: str, row: Row, column: str, inside: str = "") -> Any:
    if column not in row:
        raise ValueError(
            f"{at}: there is no `{inside}{column}`, only {', '.join(f'`{key}`' for key in row) or 'nothing'}; "
            "verl_file reads verl's schema, plain_file takes the names of your columns"
        )
    return row[column]


def _text(at: str, row: Row, column: str, inside: str = "") -> str:
    value = _column(at, row, column, inside)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{at}: `{inside}{column}` is {_shown(value)}; it must be text, and not empty")
    if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueError(f"{at}: `{inside}{column}` has half a character (a lone surrogate); mend the row")
    return value


def _truth(at: str, row: Row, column: str, inside: str = "") -> str:
    """The answer as text; numbers are answers too."""
    value = _column(at, row, column, inside)
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    return _text(at, row, column, inside)


def _shown(value: object) -> str:
    """A value in an error: its kind and its beginning."""
    if value is None or value == "":
        return "empty"
    text = repr(value)
    return f"{type(value).__name__} {text[:60]}{'...' if len(text) > 60 else ''}"
