"""Tasks from files: columns of any names, by default verl's, and GSM8K, from a jsonl or parquet file or from the hub.

verl's schema is `prompt` (chat messages, or text), `reward_model.ground_truth`, `data_source`, `extra_info`. A bad
row is an error that names its file and row; no row is dropped or repaired silently. All bad rows of a file are in one
error, or with `skip_bad_rows` in one warning.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from trimtab.data.problems import FixedTask, Message, Problem, Split, optional_module, user
from trimtab.files import iter_json_lines
from trimtab.own_parts import Option
from trimtab.text import nearest, one_line, printable, shorten, shown

# What a file's columns are called, by verl, where a recipe does not say otherwise; a file may lack the last four.
COLUMNS = {
    "prompt": "prompt",
    "answer": "reward_model.ground_truth",
    "source": "data_source",
    "extra": "extra_info",
    "solution": "",
    "system": "",
}
NAME_COLUMNS = "name your columns in the recipe, as task.columns = {prompt = 'question'}, or in warm_start.columns"
SKIP_BAD_ROWS = Option("leave out rows that cannot be used, with a warning that names them, instead of stopping")
LongPrompts = Literal["error", "drop"]
LONG_PROMPTS = Option(
    "what to do about prompts that are longer than rollout.max_prompt_tokens or leave no room for a response: error "
    "stops, drop leaves them out before the first step and says how many"
)
MAX_REASONS, MAX_ROWS = 5, 10  # of an error about bad rows: different reasons, and numbers of rows for each
BOXED_SUFFIX = "\nPlease reason step by step, and put your final answer within \\boxed{}."

# Of parquet, which is read in pieces: a few kilobytes of a dictionary may stand for terabytes of text.
LEAST_LIMIT = 256 << 20  # bytes that any file may decode to
MOST_GROWTH = 100  # bytes for a byte of a larger file
ROW_BYTES = 100  # of a row in Python, at least
BATCH = 1024  # rows
SHARED_BEGINNINGS = "DELTA_BYTE_ARRAY"  # an encoding: a few bytes stand for a text that begins like the one before

Row = Mapping[str, Any]


def file_task(
    split: Split,
    path: Annotated[
        str | list[str] | dict[str, float] | None,
        Option(
            "a jsonl or parquet file, or the name of a dataset on the hub; several as a list, or as a table that gives "
            "each a weight, its share of the prompts"
        ),
    ] = None,
    eval_path: Annotated[
        str | list[str] | None,
        Option("a file, or a list of them, of held-out problems; none means no evaluation"),
    ] = None,
    rule: Annotated[str, Option("the rule that grades responses ([rewards.md](rewards.md))")] = "boxed",
    suffix: Annotated[str, Option("text appended to the last message of each prompt")] = "",
    columns: Annotated[
        dict[str, str], Option(f"your column names, as a table with any of the keys {', '.join(COLUMNS)}")
    ] = {},  # noqa: B006  (never changed)
    skip_bad_rows: Annotated[bool, SKIP_BAD_ROWS] = False,
    long_prompts: Annotated[LongPrompts, LONG_PROMPTS] = "error",  # a run heeds it, which has a tokenizer
) -> FixedTask:
    """Problems from a file or several, by default with the columns of verl's schema."""
    source = path if split == "train" else eval_path
    if source is None:
        raise ValueError("task.name='file' needs task.path: a jsonl or parquet file")
    check_paths(source)
    if isinstance(source, dict):
        source = dict(sorted(source.items()))  # the order of a table means nothing
    files = [
        read_file(each, rule=rule, suffix=suffix, columns=columns, skip_bad_rows=skip_bad_rows)
        for each in source_paths(source)
    ]
    if len(files) == 1:
        return files[0]
    weights = zip(map(len, files), source.values(), strict=True) if isinstance(source, dict) else ()
    problems = tuple(problem for file in files for problem in file.problems)
    return FixedTask(" + ".join(file.name for file in files), problems, tuple(weights))


def source_paths(source: object) -> list[str]:
    """Return the paths that a key for files holds: a path, a list of them, or a table of paths and weights."""
    if isinstance(source, str):
        return [source]
    return [path for path in source if isinstance(path, str)] if isinstance(source, list | dict) else []


def check_paths(source: object) -> None:
    """Raise ValueError for a list or table of paths that names no file, or gives one a weight that is not above 0."""
    paths = source_paths(source)
    if not paths or not all(path.strip() for path in paths):
        raise ValueError(f"{shown(source)} names no file: write a path, or several as a list or a table of weights")
    if len({*paths}) < len(paths):
        raise ValueError(f"{shown(source)} names a file twice: to use it more often, write a table of weights")
    for path, weight in source.items() if isinstance(source, dict) else ():
        if not 0 < weight < math.inf:
            raise ValueError(f"the weight of {shown(path)} is {weight}: it must be above 0")


def gsm8k_task(
    split: Split,
    path: Annotated[
        str | None, Option("GSM8K as published, as a jsonl or parquet file; none loads it from the hub")
    ] = None,
    eval_path: Annotated[str | None, Option("the same for held-out problems; none means no evaluation")] = None,
    suffix: Annotated[str, Option("text appended to each question")] = BOXED_SUFFIX,
    skip_bad_rows: Annotated[bool, SKIP_BAD_ROWS] = False,
    long_prompts: Annotated[LongPrompts, LONG_PROMPTS] = "error",  # a run heeds it, which has a tokenizer
) -> FixedTask:
    """The questions of GSM8K, with their worked solutions."""
    source = (path if split == "train" else eval_path) or "openai/gsm8k"
    return gsm8k(source, suffix, skip_bad_rows=skip_bad_rows)


def read_file(
    source: str,
    rule: str = "boxed",
    suffix: str = "",
    split: str = "train",
    config: str | None = None,
    columns: Mapping[str, str] | None = None,
    skip_bad_rows: bool | None = None,
) -> FixedTask:
    """Read a file of problems; `suffix` is appended to the last message of each prompt.

    `columns` has the names of the file's columns where they are not those of verl's schema; a dot leads into an
    object, as in `reward_model.ground_truth`. For `skip_bad_rows` see `read_problems`.
    """
    named, name = check_columns(columns or {}, COLUMNS), Path(source).stem

    def problem(location: str, row: Row) -> Problem:
        return _problem(location, row, name, rule, suffix, named)

    return FixedTask(name, read_problems(source, problem, split, config, skip_bad_rows))


def check_columns(given: Mapping[str, str], known: Iterable[str] = COLUMNS) -> dict[str, str]:
    """Return the names of the columns that a recipe gives, or raise if it names something that no file has."""
    for part, column in given.items():
        if part not in known:
            raise ValueError(f"no problem has a {shown(part)}: {nearest(part, known)}")
        if not column:
            raise ValueError(f"{part} = '': name a column of the file, or leave it out")
    return dict(given)


def worked_solutions(source: str, suffix: str, columns: Mapping[str, str]) -> tuple[Problem, ...]:
    """Read a warm start's file."""
    return read_problems(source, lambda location, row: worked_solution(location, row, suffix, columns))


def worked_solution(location: str, row: Row, suffix: str, columns: Mapping[str, str]) -> Problem:
    """Read a row of a warm start's file: a prompt as in a task's file, and its solution.

    The answer and the extra column may be missing: only an environment's `reset` looks at them.
    """
    prompt = _messages(location, row, columns, suffix)
    solution = _solution(location, row, columns.get("solution", "solution"))
    verl = row.get("reward_model")
    has_answer = "answer" in columns or (isinstance(verl, Mapping) and "ground_truth" in verl)
    answer = _ground_truth(location, row, columns.get("answer", COLUMNS["answer"])) if has_answer else ""
    extra = _optional(location, row, columns, "extra")
    given = extra if isinstance(extra, Mapping) else {}
    return Problem(prompt, answer, rule="", source=location, solution=solution, extra=given, location=location)


def gsm8k(
    source: str = "openai/gsm8k",
    suffix: str = BOXED_SUFFIX,
    split: str = "train",
    config: str | None = "main",
    skip_bad_rows: bool | None = None,
) -> FixedTask:
    """Read GSM8K: `question`, and `answer` with the result after `####`."""

    def problem(location: str, row: Row) -> Problem:
        return _gsm8k_problem(location, row, suffix)

    return FixedTask("gsm8k", read_problems(source, problem, split, config, skip_bad_rows))


def read_problems(
    source: str,
    make: Callable[[str, Row], Problem],
    split: str = "train",
    config: str | None = None,
    skip_bad_rows: bool | None = None,
) -> tuple[Problem, ...]:
    """Make a problem of every row, or raise one error about all bad rows: those for which `make` raises ValueError.

    With `skip_bad_rows` they are left out and a warning names them. None is for files to which the key
    `task.skip_bad_rows` does not apply, so that the error does not advise it.
    """
    problems: list[Problem] = []
    bad: list[str] = []
    for location, row in read_rows(source, split, config, on_error=bad.append):
        try:
            problems.append(make(location, row))
        except ValueError as error:
            bad.append(f"{location}: {str(error).removeprefix(f'{location}: ')}")
    if not problems and not bad:
        raise ValueError(f"task file {source!r} has no rows: give one with problems")
    count = f"{len(bad):,} of {len(problems) + len(bad):,} rows"
    if bad and skip_bad_rows and problems:
        warnings.warn(f"{count} are left out (task.skip_bad_rows = true):\n{_describe_bad_rows(bad)}", stacklevel=2)
    elif bad:
        # Where no row can be used the file is not what the recipe says, and nothing would be left of it.
        skip = ", or leave them out with task.skip_bad_rows = true" if problems and skip_bad_rows is not None else ""
        described = _describe_bad_rows(bad)
        separator = "\n" if "\n" in described else "; "
        raise ValueError(f"{described}{separator}{count} cannot be used: mend or remove them{skip}")
    return tuple(problems)


def _describe_bad_rows(bad: Sequence[str]) -> str:
    """Return a line for each reason why rows are bad, with the file and the numbers of the rows."""
    rows: dict[tuple[str, str], list[str]] = {}
    for error in bad:
        place, number, reason = re.split(r", row (\d+): ", error, maxsplit=1)
        rows.setdefault((place, reason), []).append(number)
    lines = []
    for (place, reason), numbers in list(rows.items())[:MAX_REASONS]:
        more = f" and {len(numbers) - MAX_ROWS:,} more" if len(numbers) > MAX_ROWS else ""
        lines.append(f"{place}, row{'s' if numbers[1:] else ''} {', '.join(numbers[:MAX_ROWS])}{more}: {reason}")
    if len(rows) > MAX_REASONS:
        rest = sum(map(len, list(rows.values())[MAX_REASONS:]))
        lines.append(f"and {rest:,} more row{'s' if rest > 1 else ''} for other reasons")
    return "\n".join(lines)


def read_rows(
    source: str, split: str = "train", config: str | None = None, on_error: Callable[[str], None] | None = None
) -> Iterator[tuple[str, Row]]:
    """Yield (location, row) for every row of a jsonl or parquet file, or of a split and config of a hub dataset.

    A line of a jsonl file that is no JSON object, and a row of parquet whose text is not UTF-8, raises or, with
    `on_error`, is skipped.
    """
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix == ".jsonl":
            return iter_json_lines(path, on_error=on_error)
        if path.suffix != ".parquet":
            raise ValueError(f"task file {source!r} ends in {path.suffix!r}: write it as .jsonl or .parquet")
        return parquet_rows(path, on_error)
    if not is_hub_data(source):
        raise ValueError(f"task file {source!r} does not exist: give the path of a .jsonl or .parquet file")
    return _hub(source, split, config)


def is_hub_data(source: str) -> bool:
    """Return whether a name that is not a file may be that of a data set on the hub."""
    # A misspelt path must not be looked up there, where somebody else may own that name.
    path_like = Path(source).suffix in (".jsonl", ".json", ".parquet")
    return not path_like and re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", source) is not None


def _hub(source: str, split: str, config: str | None) -> Iterator[tuple[str, Row]]:
    purpose = f"{source!r} is not a file, and loading it from the hub"
    datasets = optional_module("datasets", purpose, "datasets", "hub")
    try:
        # Since version 4, which the extra `hub` asks for, a data set's own loading script is refused and not run.
        data = datasets.load_dataset(source, config, split=split)
    except Exception as error:  # it reads files of many formats, and raises whatever their readers do
        reason = shorten(printable(" ".join(str(error).split())), 300)
        raise ValueError(f"the data set {source!r} cannot be loaded: {type(error).__name__}: {reason}") from None
    for number, row in enumerate(data, start=1):
        yield f"{source}[{split}], row {number}", row


def _problem(location: str, row: Row, name: str, rule: str, suffix: str, columns: Mapping[str, str]) -> Problem:
    prompt = _messages(location, row, columns, suffix)
    answer = _ground_truth(location, row, columns.get("answer", COLUMNS["answer"]))
    source, extra = (_optional(location, row, columns, part) for part in ("source", "extra"))
    if not isinstance(source, str | None):
        raise ValueError(
            f"{location}: `{columns.get('source', COLUMNS['source'])}` is {_shown(source)}; it must be text"
        )
    if not isinstance(extra, Mapping | None):
        raise ValueError(
            f"{location}: `{columns.get('extra', COLUMNS['extra'])}` is {_shown(extra)}; it must be an object"
        )
    solution = _solution(location, row, columns["solution"]) if "solution" in columns else None
    return Problem(prompt, answer, rule, source or name, solution, extra=extra or {}, location=location)


def _optional(location: str, row: Row, columns: Mapping[str, str], part: str) -> Any:
    """Return the value of a column that a file may lack, unless the recipe names it."""
    return _lookup(location, row, columns[part]) if part in columns else row.get(COLUMNS[part])


def _messages(location: str, row: Row, columns: Mapping[str, str], suffix: str) -> tuple[Message, ...]:
    column = columns.get("prompt", COLUMNS["prompt"])
    prompt = _lookup(location, row, column)
    if isinstance(prompt, str):
        messages = user(_text(location, row, column))
    elif isinstance(prompt, list) and prompt:
        messages = tuple(_message(location, message, column) for message in prompt)
    else:
        raise ValueError(f"{location}: `{column}` is {_shown(prompt)}; it must be text or a list of chat messages")
    if "system" in columns:
        messages = ({"role": "system", "content": _text(location, row, columns["system"])}, *messages)
    return (*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + suffix})


def _solution(location: str, row: Row, column: str) -> str | tuple[Message, ...]:
    """Return a worked solution: a text, or messages of assistant and tool in turn."""
    solution = _lookup(location, row, column)
    if not isinstance(solution, list) or not solution:
        return _text(location, row, column)
    names = [each.get("name") if isinstance(each, Mapping) else None for each in solution]
    messages = [_message(location, message, column) for message in solution]
    return tuple({**m, "name": n} if isinstance(n, str) else m for m, n in zip(messages, names, strict=True))


def _message(location: str, message: object, column: str) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(
            f"{location}: a chat message of `{column}` is {_shown(message)}; it needs `role` and `content`"
        )
    return {key: _text(location, message, key, f"{column}.") for key in ("role", "content")}


def _gsm8k_problem(location: str, row: Row, suffix: str) -> Problem:
    question, worked = _text(location, row, "question"), _text(location, row, "answer")
    working, mark, result = worked.rpartition("####")  # the last one: the working may contain the mark
    result = result.strip().replace(",", "")
    if not mark or not result:
        raise ValueError(f"{location}: `answer` is {_shown(worked)}; GSM8K writes the result after ####")
    working = re.sub(r"<<[^<>]*>>", "", working).strip()  # GSM8K's calculator annotations
    solution = f"{working}\nThe answer is \\boxed{{{result}}}."
    return Problem(user(question + suffix), result, "boxed", "gsm8k", solution, location=location)


def _lookup(location: str, row: Row, column: str, inside: str = "") -> Any:
    """Return the value of a column; a dot leads into an object."""
    if column in row:
        return row[column]
    first, _, rest = column.partition(".")
    if first not in row:
        found = f", only {', '.join(f'`{shorten(one_line(str(key)))}`' for key in row)}"
        if not row:
            found = f": {f'`{inside[:-1]}`' if inside else 'the row'} is an empty object"
        raise ValueError(f"{location}: there is no `{inside}{first}`{found}; {NAME_COLUMNS}")
    if not isinstance(row[first], Mapping):
        raise ValueError(f"{location}: `{inside}{first}` is {_shown(row[first])}; it must be an object with `{rest}`")
    return _lookup(location, row[first], rest, f"{inside}{first}.")


def _text(location: str, row: Row, column: str, inside: str = "") -> str:
    value = _lookup(location, row, column, inside)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{location}: `{inside}{column}` is {_shown(value)}; it must be text, and not empty")
    # JSON can hold half of a surrogate pair, on which tokenizers raise in the middle of a run.
    if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueError(f"{location}: `{inside}{column}` has a lone surrogate, which no tokenizer takes; fix the row")
    return value


def _ground_truth(location: str, row: Row, column: str) -> str:
    """Return the ground truth as text; JSON numbers are accepted too."""
    value = _lookup(location, row, column)
    # True is an int too; and `math.isfinite` raises for an integer that no float can hold.
    if (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and math.isfinite(value)):
        return str(value)
    return _text(location, row, column)


def _shown(value: object) -> str:
    """Describe a value for an error message: its type and its beginning."""
    if value is None or value == "":
        return "empty"
    text = repr(value)
    return f"{type(value).__name__} {text[:60]}{'...' if len(text) > 60 else ''}"


def parquet_rows(path: Path, on_error: Callable[[str], None] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`FILE, row N`, the row); text that is not UTF-8 raises ValueError or, with `on_error`, is skipped."""
    parquet = optional_module("pyarrow.parquet", f"reading {path}", "pyarrow")
    limit, decoded, number = max(LEAST_LIMIT, MOST_GROWTH * path.stat().st_size), 0, 0
    try:
        with parquet.ParquetFile(path) as file:
            texts = _texts(file)
        # Texts stay in the dictionaries that they are stored in until their size is known.
        with parquet.ParquetFile(path, read_dictionary=texts) as file:
            _check_counts(path, file, limit)
            for batch in file.iter_batches(_batch_size(file.metadata, limit)):
                decoded += ROW_BYTES * batch.num_rows + sum(map(_decoded_bytes, batch.columns))
                _check_size(path, decoded, limit)
                for row in _rows(batch):
                    number += 1
                    place = f"{path}, row {number}"
                    if not isinstance(row, UnicodeDecodeError):
                        yield place, row
                        continue
                    problem = f"{place}: text that is not UTF-8 (byte {row.start + 1} of it); mend or remove the row"
                    if on_error is None:
                        raise BadTextError(problem)
                    on_error(problem)
    except BadTextError as error:
        raise ValueError(str(error)) from None
    except (ValueError, OSError) as error:  # pyarrow's own errors are subclasses of these
        raise ValueError(f"{path}: not a readable parquet file ({error}); write it again") from None


class BadTextError(ValueError):
    """A file that can be read, but not all that it holds."""


def _texts(file: Any) -> list[str]:
    """Return the paths of the columns of texts, also inside of lists and objects, that can stay in dictionaries."""
    # pyarrow cannot keep those in dictionaries whose texts share their beginnings.
    shared = {number for number, chunk in _chunks(file.metadata) if SHARED_BEGINNINGS in chunk.encodings}
    columns = [file.schema.column(number) for number in range(len(file.schema)) if number not in shared]
    return [c.path for c in columns if c.physical_type == "BYTE_ARRAY" and c.logical_type.type != "DECIMAL"]


def _chunks(metadata: Any) -> Iterator[tuple[int, Any]]:
    """Yield the number of a column and its values in a group of rows."""
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for number in range(group.num_columns):
            yield number, group.column(number)


def _check_counts(path: Path, file: Any, limit: int) -> None:
    """Raise if the file says itself that it has too much: a list in one row, or one text, may have any size."""
    for number, chunk in _chunks(file.metadata):
        _check_size(path, max(8, file.schema.column(number).length) * chunk.num_values, limit)
        _check_size(path, chunk.total_uncompressed_size, limit)


def _batch_size(metadata: Any, limit: int) -> int:
    """Return how many rows to read at a time: a text may be as long as all that its column holds."""
    chunks = [chunk for _, chunk in _chunks(metadata) if SHARED_BEGINNINGS in chunk.encodings]
    longest = max((chunk.total_uncompressed_size for chunk in chunks), default=0)
    return max(1, min(BATCH, limit // max(longest, 1)))


def _check_size(path: Path, size: int, limit: int) -> None:
    if size > limit:
        raise BadTextError(
            f"{path}: its rows have more than {limit >> 20:,} MB, and the file {path.stat().st_size:,} bytes; if you "
            "trust it, write it as .jsonl"
        )


def _decoded_bytes(array: Any) -> int:
    """Return the bytes of an array with its texts written out."""
    arrow = optional_module("pyarrow", "reading parquet", "pyarrow")
    compute = optional_module("pyarrow.compute", "reading parquet", "pyarrow")
    if isinstance(array, arrow.DictionaryArray):
        lengths = compute.binary_length(array.dictionary).cast(arrow.int64())
        return int(compute.sum(lengths.take(array.indices)).as_py() or 0)
    if isinstance(array, arrow.StructArray):
        return sum(map(_decoded_bytes, array.flatten()))
    if isinstance(array, arrow.ListArray | arrow.LargeListArray):
        return _decoded_bytes(array.flatten())
    return int(array.nbytes)


def _rows(batch: Any) -> Iterator[dict[str, Any] | UnicodeDecodeError]:
    """Yield the rows of a batch; in place of one with bytes that are not UTF-8 the error."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:  # before the first row: the list was not finished
        for number in range(batch.num_rows):
            try:
                (row,) = batch.slice(number, 1).to_pylist()
            except UnicodeDecodeError as error:
                row = error
            yield row
