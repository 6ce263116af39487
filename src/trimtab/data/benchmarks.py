"""The mathematics benchmarks: their Hugging Face datasets, column names, and samples per problem.

They are read from a folder (files in verl's schema, parquet or jsonl; GSM8K as it was published) or from the Hugging
Face hub. A row that cannot be used is an error that names its file and row; no row is dropped silently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

from trimtab.data.files import NAME_COLUMNS, gsm8k, read_file, read_rows
from trimtab.data.problems import FixedTask, Problem, user
from trimtab.text import nearest, shown

HELD_OUT = "held-out:"  # before the folder of a run: its held-out problems
FILE_ENDINGS = (".jsonl", ".parquet")
BOX_RULES = ("math", "boxed", "strict-box")  # rules that extract the answer from a box
PROMPT_SUFFIX = "\nPlease reason step by step, and put your final answer within \\boxed{}"
SMALL, LARGE = 32, 4  # samples per problem of small and large benchmarks, as in the STAPO and JustRL papers


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: its size, samples per problem, and its dataset and columns on the hub."""

    name: str
    title: str
    size: int
    samples: int
    hub: str
    question: str
    answer: str
    split: str = "test"
    files: tuple[str, ...] = ()  # looked for in a folder, names without ending; default: the benchmark's name


BENCHMARKS: Mapping[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("aime24", "AIME24", 30, SMALL, "math-ai/aime24", "problem", "solution"),
        Benchmark("aime25", "AIME25", 30, SMALL, "math-ai/aime25", "problem", "answer"),
        Benchmark("amc23", "AMC23", 40, SMALL, "math-ai/amc23", "question", "answer"),
        Benchmark("math500", "MATH500", 500, LARGE, "HuggingFaceH4/MATH-500", "problem", "answer"),
        Benchmark("minerva", "Minerva", 272, LARGE, "math-ai/minervamath", "question", "answer"),
        Benchmark("olympiadbench", "OlympiadBench", 674, LARGE, "math-ai/olympiadbench", "question", "final_answer"),
        Benchmark("gsm8k", "GSM8K", 1319, LARGE, "openai/gsm8k", "question", "answer", files=("gsm8k_test", "gsm8k")),
    )
}
DEFAULT_BENCHMARKS = tuple(name for name in BENCHMARKS if name != "gsm8k")


@dataclass(frozen=True)
class BenchmarkProblem:
    """A problem of a benchmark, with its id there and the file and row it was read from."""

    benchmark: str
    id: str
    location: str
    problem: Problem = field(repr=False)


def find_benchmark(name: str) -> Benchmark:
    """Return a benchmark by its name, or the one that a file of the user's own is."""
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    if Path(name).suffix in FILE_ENDINGS:
        return Benchmark(name, Path(name).stem, 0, LARGE, hub="", question="", answer="")
    if name.startswith(HELD_OUT):
        return Benchmark(name, f"{Path(name.removeprefix(HELD_OUT)).name}, held-out", 0, LARGE, "", "", "")
    hint = f"{nearest(name, BENCHMARKS)} (a file of your own ends in {' or '.join(FILE_ENDINGS)})"
    raise ValueError(f"unknown benchmark {shown(name)}: {hint}")


def load_benchmark(
    name: str,
    data: Path | None = None,
    suffix: str = PROMPT_SUFFIX,
    rule: str = "math",
    columns: Mapping[str, str] | None = None,
) -> list[BenchmarkProblem]:
    """Load every problem of a benchmark from a folder, or from the hub if no folder is given.

    `columns` are the names of the columns of a file of the user's own, which is its own benchmark.
    """
    benchmark = find_benchmark(name)
    if name in BENCHMARKS:
        source = benchmark.hub if data is None else str(find_file(benchmark, data))
        task = _read(benchmark, source, suffix, hub=data is None)
        problems = [replace(problem, rule=rule) for problem in task.problems]
    else:
        problems = list(_own_file(name, suffix, rule, columns or {}).problems)
    ids = _ids(benchmark, problems)
    loaded = [
        BenchmarkProblem(name, key, problem.location, problem) for key, problem in zip(ids, problems, strict=True)
    ]
    for item in loaded:
        if name in BENCHMARKS or rule in BOX_RULES:  # any other rule may want an answer of any form
            _check_answer(item)
    return loaded


def _own_file(path: str, suffix: str, rule: str, columns: Mapping[str, str]) -> FixedTask:
    try:
        return read_file(path, rule=rule, suffix=suffix, columns=columns)
    except ValueError as error:  # `eval` has no recipe
        advice = "name your columns with --columns prompt=question,answer=result"
        raise ValueError(str(error).replace(NAME_COLUMNS, advice)) from None


def find_file(benchmark: Benchmark, data: Path) -> Path:
    """Return the file of a benchmark in a folder."""
    if not data.is_dir():
        raise ValueError(f"--data {data} is not a folder: give the one that holds the benchmarks' files")
    names = [f"{stem}{ending}" for stem in benchmark.files or (benchmark.name,) for ending in (".parquet", ".jsonl")]
    for name in names:
        if (data / name).is_file():
            return data / name
    raise ValueError(f"{benchmark.title} is not in {data}: none of {', '.join(names)} exists")


def _read(benchmark: Benchmark, source: str, suffix: str, hub: bool) -> FixedTask:
    if benchmark.name == "gsm8k":
        return gsm8k(source, suffix=suffix, split=benchmark.split)
    if not hub:
        return read_file(source, suffix=suffix)
    if benchmark.answer == "final_answer":  # OlympiadBench
        return _listed_answers(benchmark, source, suffix)
    columns = {"prompt": benchmark.question, "answer": benchmark.answer}
    return read_file(source, suffix=suffix, split=benchmark.split, columns=columns)


def _listed_answers(benchmark: Benchmark, source: str, suffix: str) -> FixedTask:
    """Read OlympiadBench from the hub, whose answers are lists; their members are joined by commas."""
    problems = []
    for location, row in read_rows(source, benchmark.split):
        question, parts = row.get(benchmark.question), row.get(benchmark.answer)
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"{location}: `{benchmark.question}` is missing or empty; the dataset has changed")
        answers = parts if isinstance(parts, list) else []
        if not answers or not all(isinstance(part, str) and part.strip() for part in answers):
            raise ValueError(f"{location}: `{benchmark.answer}` is {parts!r:.60}; it must be a list of answers")
        prompt, answer = user(question + suffix), ", ".join(answers)
        problems.append(Problem(prompt, answer, "math", benchmark.name, location=location))
    return FixedTask(benchmark.name, tuple(problems))


def _ids(benchmark: Benchmark, problems: Sequence[Problem]) -> list[str]:
    """Return the file's own ids (`extra_info.index`) if all are there and unique, else numbers."""
    # Stored samples and random seeds go by the id, so it must not depend on which problems are evaluated.
    own = [problem.extra.get("index") for problem in problems]
    if all(isinstance(name, str | int) for name in own) and len(set(map(str, own))) == len(own):
        return [str(name) for name in own]
    stem = benchmark.name if benchmark.name in BENCHMARKS else benchmark.title
    return [f"{stem}-{number}" for number in range(len(problems))]


def _check_answer(item: BenchmarkProblem) -> None:
    """Refuse an answer that is empty or has unbalanced braces, because every response to it would be wrong."""
    answer = item.problem.answer
    # Escaped braces are characters of the answer, not groups.
    plain = answer.replace("\\\\", "").replace("\\{", "").replace("\\}", "")
    depths = list(accumulate((character == "{") - (character == "}") for character in plain))
    if depths and (depths[-1] or min(depths) < 0):
        raise ValueError(f"{item.location}: the answer {answer[:60]!r} has unbalanced braces; fix the row")
    if not answer.replace("\\boxed", "").strip(" {}$.,"):
        raise ValueError(f"{item.location}: the answer {answer[:60]!r} is empty; fix the row")
    if item.benchmark == "gsm8k" and not re.fullmatch(r"-?\d+(\.\d+)?", answer):
        raise ValueError(f"{item.location}: the answer {answer[:60]!r} is not a number; fix the row")
