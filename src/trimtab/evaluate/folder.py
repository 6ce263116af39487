"""An evaluation is a folder: settings, problems, every generation, the verdicts on them, and the result.

Generations are only ever added, whole batches with one write and a sync each; what a killed process left half-written
is cut off. So an evaluation goes on where it stopped, and grading can be done again without sampling.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trimtab import failpoints
from trimtab.evaluate.settings import Settings, differences, digest, settings_from
from trimtab.files import locked, write_atomically
from trimtab.tasks import BenchmarkProblem, Problem

Key = tuple[str, str, int]  # benchmark, problem, sample


@dataclass(frozen=True)
class Generation:
    """One response as it is kept. `failed` says why there is none; `logp` and `entropy` are means per token."""

    benchmark: str
    problem: str
    sample: int
    prompt_hash: str
    settings: str
    seed: int
    text: str = ""
    tokens: float | None = None
    finished: bool = True
    logp: float | None = None
    entropy: float | None = None
    failed: str | None = None

    @property
    def key(self) -> Key:
        """Which sample of which problem it is."""
        return self.benchmark, self.problem, self.sample


@dataclass(frozen=True)
class EvalFolder:
    """The files of an evaluation."""

    path: Path

    @property
    def generations(self) -> Path:
        """One JSON line per sample."""
        return self.path / "generations.jsonl"

    @property
    def verdicts(self) -> Path:
        """One JSON line per graded sample."""
        return self.path / "verdicts.jsonl"

    @property
    def result(self) -> Path:
        """The figures."""
        return self.path / "result.json"

    def open(self, settings: Settings, questions: Sequence[BenchmarkProblem]) -> None:
        """Start an evaluation, or go on with one of the same settings; one without a sample yet can be started anew."""
        begun = self.generations.exists() and self.generations.stat().st_size > 0
        differ = differences(self.settings(), settings) if begun else []
        if differ:
            lines = "".join(f"\n  {line}" for line in differ)
            raise ValueError(f"{self.path} was made with other settings; choose another --out. They differ in:{lines}")
        self.path.mkdir(parents=True, exist_ok=True)
        if not begun:
            rows = [json.dumps(question_row(question)) for question in questions]
            write_atomically(self.path / "problems.jsonl", "".join(f"{row}\n" for row in rows))
        write_atomically(self.path / "settings.json", json.dumps(settings.as_json(), indent=2) + "\n")

    def settings(self) -> Settings:
        """The settings it was made with."""
        path = self.path / "settings.json"
        if not path.is_file():
            raise ValueError(f"{self.path} is no evaluation: there is no settings.json in it")
        try:
            return settings_from(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None

    def questions(self) -> list[BenchmarkProblem]:
        """The problems it asks, as they were when it started."""
        path, rule = self.path / "problems.jsonl", self.settings().rule
        questions = []
        for at, row in json_lines(path):
            try:
                problem = Problem(tuple(row["prompt"]), row["answer"], rule, row["benchmark"])
                questions.append(BenchmarkProblem(row["benchmark"], row["id"], row["location"], problem))
            except (KeyError, TypeError) as error:
                raise ValueError(f"{at}: not a problem ({error!r})") from None
        return questions

    def read(self) -> list[Generation]:
        """Every whole generation; a last line that was cut off is taken away."""
        _cut_torn_line(self.generations)
        found: dict[Key, Generation] = {}
        digest_now = self.settings().digest()
        for at, row in json_lines(self.generations):
            try:
                generation = Generation(**row)
            except TypeError as error:
                raise ValueError(f"{at}: not a generation ({error})") from None
            if generation.settings != digest_now:
                raise ValueError(f"{at}: a generation of other settings ({generation.settings}, not {digest_now})")
            if generation.key in found:
                raise ValueError(f"{at}: sample {generation.sample} of {generation.problem} is there twice")
            found[generation.key] = generation
        return list(found.values())

    def append(self, generations: Sequence[Generation]) -> None:
        """Add a batch, on the disk for good."""
        text = "".join(json.dumps(asdict(generation), sort_keys=True) + "\n" for generation in generations)
        with self.generations.open("ab", buffering=0) as file:
            if failpoints.due("generations.torn"):
                file.write(text.encode()[: len(text) // 2])
                failpoints.die()
            file.write(text.encode())
            os.fsync(file.fileno())
        failpoints.failpoint("generations.written")

    def keep_only(self, generations: Iterable[Generation]) -> None:
        """Forget all other generations."""
        text = "".join(json.dumps(asdict(generation), sort_keys=True) + "\n" for generation in generations)
        write_atomically(self.generations, text)

    def alone(self) -> AbstractContextManager[None]:
        """Hold the folder: no other process can evaluate into it meanwhile."""
        return locked(self.path)


def question_row(question: BenchmarkProblem) -> dict[str, Any]:
    """A question as it is kept."""
    problem = question.problem
    return {
        "benchmark": question.benchmark,
        "id": question.id,
        "location": question.location,
        "prompt": [dict(message) for message in problem.prompt],
        "answer": problem.answer,
        "prompt_hash": prompt_hash(question),
    }


def prompt_hash(question: BenchmarkProblem) -> str:
    """A short name for what is asked, to the letter."""
    return digest([dict(message) for message in question.problem.prompt])


def json_lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(where it is, the row) for every line of a file; nothing where there is no file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            at = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                raise ValueError(f"{at} is damaged: it is not JSON; remove the line to have it made again") from None
            if not isinstance(row, dict):
                raise ValueError(f"{at} is damaged: it is no object; remove the line to have it made again")
            yield at, row


def _cut_torn_line(path: Path) -> None:
    """Take away what follows the last line's end."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = position = file.seek(0, os.SEEK_END)
        while position > 0:
            start = max(0, position - (1 << 16))
            file.seek(start)
            found = file.read(position - start).rfind(b"\n")
            if found >= 0:
                position = start + found + 1
                break
            position = start
        if position < end:
            file.truncate(position)
            os.fsync(file.fileno())
