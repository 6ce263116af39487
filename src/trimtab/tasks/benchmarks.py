"""The mathematics benchmarks: where each lies on the hub, what its columns are called, and how often it is sampled.

They are read from a folder (files in verl's schema, parquet or jsonl; GSM8K as it was published) or by name from the
hub. A row that cannot be asked or graded is an error with its file and number; a benchmark is never silently shorter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trimtab.tasks.files import gsm8k, plain_file, read_rows, verl_file
from trimtab.tasks.problems import FixedTask, Problem

SUFFIX = "\nPlease reason step by step, and put your final answer within \\boxed{}"
SMALL, LARGE = 32, 4  # samples per problem, as the STAPO and JustRL papers have it


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: its size, samples per problem, and its place and columns on the hub.

    `files` are the names a folder may have it under.
    """

    name: str
    title: str
    size: int
    samples: int
    hub: str
    question: str
    answer: str
    split: str = "test"
    files: tuple[str, ...] = ()


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
SIX = tuple(name for name in BENCHMARKS if name != "gsm8k")


@dataclass(frozen=True)
class Question:
    """A problem of a benchmark: what it is called there, and where its row stands."""

    benchmark: str
    id: str
    at: str
    problem: Problem = field(repr=False)


def load_benchmark(name: str, data: Path | None = None, suffix: str = SUFFIX, rule: str = "math") -> list[Question]:
    """Every question of a benchmark, from a folder, or from the hub where no folder is given."""
    benchmark = BENCHMARKS[name]
    source = benchmark.hub if data is None else str(find_file(benchmark, data))
    task = _read(benchmark, source, suffix, hub=data is None)
    problems = [replace(problem, rule=rule) for problem in task.problems]
    places = [at for at, _ in _places(benchmark, source, hub=data is None)]
    ids = _ids(benchmark, problems)
    questions = [Question(name, *known) for known in zip(ids, places, problems, strict=True)]
    for question in questions:
        _check_answer(question)
    return questions


def find_file(benchmark: Benchmark, data: Path) -> Path:
    """The file of a benchmark in a folder."""
    if not data.is_dir():
        raise ValueError(f"--data {data} is no folder: give the one that holds the benchmarks' files")
    names = [f"{stem}{ending}" for stem in benchmark.files or (benchmark.name,) for ending in (".parquet", ".jsonl")]
    for name in names:
        if (data / name).is_file():
            return data / name
    raise ValueError(f"{benchmark.title} is not in {data}: there is none of {', '.join(names)}")


def _read(benchmark: Benchmark, source: str, suffix: str, hub: bool) -> FixedTask:
    if benchmark.name == "gsm8k":
        return gsm8k(source, suffix=suffix, split=benchmark.split)
    if not hub:
        return verl_file(source, suffix=suffix)
    if benchmark.answer == "final_answer":
        return _listed_answers(benchmark, source, suffix)
    return plain_file(
        source, question=benchmark.question, answer=benchmark.answer, suffix=suffix, split=benchmark.split
    )


def _listed_answers(benchmark: Benchmark, source: str, suffix: str) -> FixedTask:
    """OlympiadBench on the hub lists the parts of an answer; its answer here is the parts with commas between."""
    problems = []
    for at, row in read_rows(source, benchmark.split):
        question, parts = row.get(benchmark.question), row.get(benchmark.answer)
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"{at}: there is no `{benchmark.question}`, or it is empty; the data set has changed")
        if (
            not isinstance(parts, list)
            or not parts
            or not all(isinstance(part, str) and part.strip() for part in parts)
        ):
            raise ValueError(f"{at}: `{benchmark.answer}` is {parts!r:.60}; it must be a list of answers")
        prompt = ({"role": "user", "content": question + suffix},)
        problems.append(Problem(prompt, ", ".join(parts), "math", benchmark.name))
    return FixedTask(benchmark.name, tuple(problems))


def _places(benchmark: Benchmark, source: str, hub: bool) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Where each row stands, in the order of the problems."""
    config = "main" if benchmark.name == "gsm8k" and hub else None
    return read_rows(source, benchmark.split, config)


def _ids(benchmark: Benchmark, problems: Sequence[Problem]) -> list[str]:
    """What the file calls its problems (`extra_info.index`) where that tells them apart, else their numbers."""
    named = [problem.extra.get("index") for problem in problems]
    if all(isinstance(name, str | int) for name in named) and len(set(map(str, named))) == len(named):
        return [str(name) for name in named]
    return [f"{benchmark.name}-{number}" for number in range(len(problems))]


def _check_answer(question: Question) -> None:
    """An answer without content, or with braces that do not match, would make every response wrong."""
    answer = question.problem.answer
    plain = answer.replace("\\\\", "").replace("\\{", "").replace("\\}", "")
    depth = lowest = 0
    for character in plain:
        depth += (character == "{") - (character == "}")
        lowest = min(lowest, depth)
    if depth or lowest < 0:
        raise ValueError(f"{question.at}: the answer {answer[:60]!r} has braces that do not match; mend the row")
    if not answer.replace("\\boxed", "").strip(" {}$.,"):
        raise ValueError(f"{question.at}: the answer {answer[:60]!r} says nothing; mend the row")
    if question.benchmark == "gsm8k" and not re.fullmatch(r"-?\d+(\.\d+)?", answer):
        raise ValueError(f"{question.at}: the answer {answer[:60]!r} is no number; mend the row")
