"""Tasks from files: verl's schema, plain columns, and GSM8K, from a jsonl or parquet file or from the hub.

verl's schema is `prompt` (chat messages, or text), `reward_model.ground_truth`, `data_source`, `extra_info`. A bad
row is an error that names its file and row; no row is dropped or repaired silently.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trimtab.files import iter_json_lines
from trimtab.tasks.problems import FixedTask, Message, Problem, optional_module, user
from trimtab.text import printable, shorten

BOXED_SUFFIX = "\nPlease reason step by step, and put your final answer within \\boxed{}."

Row = Mapping[str, Any]


def verl_file(
    source: str, rule: str = "boxed", suffix: str = "", split: str = "train", config: str | None = None
) -> FixedTask:
    """Read a file in verl's schema; `suffix` is appended to the last message of each prompt."""
    name, rows = Path(source).stem, read_rows(source, split, config)
    return _task(name, source, (_verl_problem(location, row, name, rule, suffix) for location, row in rows))


def plain_file(
    source: str,
    *,
    question: str = "question",
    answer: str = "answer",
    solution: str | None = None,
    rule: str = "boxed",
    suffix: str = BOXED_SUFFIX,
    skip_unanswered: bool = False,
    split: str = "train",
    config: str | None = None,
) -> FixedTask:
    """Read a file with a column of questions and one of answers; `solution` may name a column of worked solutions.

    A row whose answer is empty is an error, or is left out with `skip_unanswered`.
    """

    name, problems = Path(source).stem, []
    for location, row in read_rows(source, split, config):
        if skip_unanswered and _column(location, row, answer) in (None, ""):
            continue
        prompt = user(_text(location, row, question) + suffix)
        worked = _text(location, row, solution) if solution else None
        problems.append(Problem(prompt, _ground_truth(location, row, answer), rule, name, worked, location=location))
    return _task(name, source, problems)


def gsm8k(
    source: str = "openai/gsm8k", suffix: str = BOXED_SUFFIX, split: str = "train", config: str | None = "main"
) -> FixedTask:
    """Read GSM8K: `question`, and `answer` with the result after `####`."""
    rows = read_rows(source, split, config)
    return _task("gsm8k", source, (_gsm8k_problem(location, row, suffix) for location, row in rows))


def read_rows(source: str, split: str = "train", config: str | None = None) -> Iterator[tuple[str, Row]]:
    """Yield (location, row) for every row of a jsonl or parquet file, or of a split and config of a hub dataset."""
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix == ".jsonl":
            return iter_json_lines(path)
        if path.suffix != ".parquet":
            raise ValueError(f"task file {source!r} ends in {path.suffix!r}: write it as .jsonl or .parquet")
        return _parquet(path)
    # A misspelt path must not be looked up on the hub, where somebody else may own that name.
    if path.suffix in (".jsonl", ".json", ".parquet") or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", source):
        raise ValueError(f"task file {source!r} does not exist: give the path of a .jsonl or .parquet file")
    return _hub(source, split, config)


def _parquet(path: Path) -> Iterator[tuple[str, Row]]:
    parquet = optional_module("pyarrow.parquet", f"reading {path}", "pyarrow")
    try:
        table = parquet.read_table(path)
    except (ValueError, OSError) as error:  # pyarrow's own errors are subclasses of these
        raise ValueError(f"{path}: not a readable parquet file ({error}); write it again") from None
    for number, row in enumerate(table.to_pylist(), start=1):
        yield f"{path}, row {number}", row


def _hub(source: str, split: str, config: str | None) -> Iterator[tuple[str, Row]]:
    purpose = f"{source!r} is not a file, and loading it from the hub"
    datasets = optional_module("datasets", purpose, "datasets")
    try:
        # Since version 4, which the extra `hub` asks for, a data set's own loading script is refused and not run.
        data = datasets.load_dataset(source, config, split=split)
    except Exception as error:  # it reads files of many formats, and raises whatever their readers do
        reason = shorten(printable(" ".join(str(error).split())), 300)
        raise ValueError(f"the data set {source!r} cannot be loaded: {type(error).__name__}: {reason}") from None
    for number, row in enumerate(data, start=1):
        yield f"{source}[{split}], row {number}", row


def _task(name: str, source: str, problems: Iterable[Problem]) -> FixedTask:
    task = FixedTask(name, tuple(problems))
    if not task.problems:
        raise ValueError(f"task file {source!r} has no rows: give one with problems")
    return task


def _verl_problem(location: str, row: Row, name: str, rule: str, suffix: str) -> Problem:
    prompt = _messages(location, row)
    graded = _column(location, row, "reward_model")
    if not isinstance(graded, Mapping):
        raise ValueError(f"{location}: `reward_model` is {_shown(graded)}; it must be an object with `ground_truth`")
    answer = _ground_truth(location, graded, "ground_truth", "reward_model.")
    source, extra = row.get("data_source"), row.get("extra_info")
    if not isinstance(source, str | None):
        raise ValueError(f"{location}: `data_source` is {_shown(source)}; it must be text")
    if not isinstance(extra, Mapping | None):
        raise ValueError(f"{location}: `extra_info` is {_shown(extra)}; it must be an object")
    last = prompt[-1]
    prompt = (*prompt[:-1], {**last, "content": last["content"] + suffix})
    return Problem(prompt, answer, rule, source or name, extra=extra or {}, location=location)


def _messages(location: str, row: Row) -> tuple[Message, ...]:
    prompt = _column(location, row, "prompt")
    if isinstance(prompt, str):
        return user(_text(location, row, "prompt"))
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"{location}: `prompt` is {_shown(prompt)}; it must be text or a list of chat messages")
    for message in prompt:
        if not isinstance(message, Mapping):
            raise ValueError(
                f"{location}: a chat message of `prompt` is {_shown(message)}; it needs `role` and `content`"
            )
    return tuple({key: _text(location, message, key, "prompt.") for key in ("role", "content")} for message in prompt)


def _gsm8k_problem(location: str, row: Row, suffix: str) -> Problem:
    question, worked = _text(location, row, "question"), _text(location, row, "answer")
    working, mark, result = worked.rpartition("####")  # the last one: the working may contain the mark
    result = result.strip().replace(",", "")
    if not mark or not result:
        raise ValueError(f"{location}: `answer` is {_shown(worked)}; GSM8K writes the result after ####")
    working = re.sub(r"<<[^<>]*>>", "", working).strip()  # GSM8K's calculator annotations
    solution = f"{working}\nThe answer is \\boxed{{{result}}}."
    return Problem(user(question + suffix), result, "boxed", "gsm8k", solution, location=location)


def _column(location: str, row: Row, column: str, inside: str = "") -> Any:
    if column not in row:
        columns = ", ".join(f"`{key}`" for key in row) or "nothing"
        advice = "verl_file reads verl's schema, plain_file takes the names of your columns"
        raise ValueError(f"{location}: there is no `{inside}{column}`, only {columns}; {advice}")
    return row[column]


def _text(location: str, row: Row, column: str, inside: str = "") -> str:
    value = _column(location, row, column, inside)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{location}: `{inside}{column}` is {_shown(value)}; it must be text, and not empty")
    # JSON can hold half of a surrogate pair, on which tokenizers raise in the middle of a run.
    if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueError(f"{location}: `{inside}{column}` has a lone surrogate, which no tokenizer takes; fix the row")
    return value


def _ground_truth(location: str, row: Row, column: str, inside: str = "") -> str:
    """Return the ground truth as text; JSON numbers are accepted too."""
    value = _column(location, row, column, inside)
    # True is an int too; and `math.isfinite` raises for an integer that no float can hold.
    if (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and math.isfinite(value)):
        return str(value)
    return _text(location, row, column, inside)


def _shown(value: object) -> str:
    """Describe a value for an error message: its type and its beginning."""
    if value is None or value == "":
        return "empty"
    text = repr(value)
    return f"{type(value).__name__} {text[:60]}{'...' if len(text) > 60 else ''}"
