"""The folder of an evaluation: settings, problems, every generation, the verdicts on them, and the result.

Generations are only appended, a batch at a time with one write and one fsync; a torn last line of a killed process is
cut off. So an evaluation can be resumed, and responses can be graded again without sampling.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trimtab import failpoints
from trimtab.evaluate.settings import EvalSettings, differences, digest, settings_from
from trimtab.files import append_json_lines, cut_torn_line, iter_json_lines, write_atomically, write_json_lines
from trimtab.tasks import BenchmarkProblem, Problem

SampleKey = tuple[str, str, int]  # benchmark, problem, sample
Batches = Generator[list["Generation"], None, None]


@dataclass(frozen=True)
class Generation:
    """One stored response. `failed` is the reason where there is none; `logp` and `entropy` are means per token."""

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
    def key(self) -> SampleKey:
        """Return which sample of which problem it is."""
        return self.benchmark, self.problem, self.sample


@dataclass(frozen=True)
class GenerationRequest:
    """A problem and the number of samples to generate for it."""

    item: BenchmarkProblem
    samples: int

    def sample_keys(self) -> list[SampleKey]:
        """Return the keys of its samples."""
        return [(self.item.benchmark, self.item.id, sample) for sample in range(self.samples)]

    def generation(self, sample: int, settings: EvalSettings, **known: Any) -> Generation:
        """Return one of its samples; `known` are the fields of `Generation` that the generator fills in."""
        item = self.item
        return Generation(item.benchmark, item.id, sample, prompt_hash(item), settings.digest(), **known)


@dataclass(frozen=True)
class EvalFolder:
    """The files of an evaluation."""

    path: Path

    @property
    def generations(self) -> Path:
        """Return the file with one JSON line per sample."""
        return self.path / "generations.jsonl"

    @property
    def verdicts(self) -> Path:
        """Return the file with one JSON line per graded sample."""
        return self.path / "verdicts.jsonl"

    def open(self, settings: EvalSettings, problems: Sequence[BenchmarkProblem]) -> None:
        """Start an evaluation, or resume one with the same settings; without any sample yet it starts afresh."""
        begun = self.generations.exists() and self.generations.stat().st_size > 0
        differ = differences(self.settings(), settings) if begun else []
        if differ:
            lines = "".join(f"\n  {line}" for line in differ)
            raise ValueError(f"{self.path} was made with other settings; choose another --out. They differ in:{lines}")
        self.path.mkdir(parents=True, exist_ok=True)
        if not begun:  # the problems of stored generations must not change under them
            write_json_lines(self.path / "problems.jsonl", map(problem_row, problems))
        # Also when resumed: the settings that may differ are those of the last process.
        write_atomically(self.path / "settings.json", json.dumps(settings.as_json(), indent=2) + "\n")

    def settings(self) -> EvalSettings:
        """Read the settings."""
        path = self.path / "settings.json"
        if not path.is_file():
            raise ValueError(f"{self.path} is not an evaluation: there is no settings.json in it")
        try:
            return settings_from(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None

    def problems(self) -> list[BenchmarkProblem]:
        """Read the problems as they were when the evaluation started."""
        rule = self.settings().rule
        problems = []
        for location, row in rows(self.path / "problems.jsonl"):
            try:
                problem = Problem(tuple(row["prompt"]), row["answer"], rule, row["benchmark"])
                problems.append(BenchmarkProblem(row["benchmark"], row["id"], row["location"], problem))
            except (KeyError, TypeError) as error:
                raise ValueError(f"{location}: not a problem ({error!r})") from None
        return problems

    def read(self) -> list[Generation]:
        """Read every generation; a torn last line is removed from the file."""
        return list(self.iterate())

    def iterate(self) -> Iterator[Generation]:
        """Read the generations one by one: a server may send any amount of text, so memory must not hold all of it."""
        cut_torn_line(self.generations)
        found: set[SampleKey] = set()
        expected = self.settings().digest()  # lines of another evaluation may have been copied in
        for location, row in rows(self.generations):
            try:
                generation = Generation(**row)
            except TypeError as error:
                raise ValueError(f"{location}: not a generation ({error})") from None
            if generation.settings != expected:
                raise ValueError(f"{location}: a generation of other settings ({generation.settings}, not {expected})")
            if generation.key in found:
                raise ValueError(f"{location}: sample {generation.sample} of {generation.problem} is there twice")
            found.add(generation.key)
            yield generation

    def append(self, generations: Sequence[Generation]) -> None:
        """Append a batch and wait until it is on the disk."""
        append_json_lines(self.generations, *map(asdict, generations), durable=True)
        failpoints.failpoint("generations.written")

    def keep_only(self, generations: Iterable[Generation]) -> None:
        """Remove all other generations."""
        write_json_lines(self.generations, map(asdict, generations))


def problem_row(item: BenchmarkProblem) -> dict[str, Any]:
    """Return a problem as a JSON object."""
    return {
        "benchmark": item.benchmark,
        "id": item.id,
        "location": item.location,
        "prompt": [dict(message) for message in item.problem.prompt],
        "answer": item.problem.answer,
        "prompt_hash": prompt_hash(item),
    }


def prompt_hash(item: BenchmarkProblem) -> str:
    """Return a short hash of the prompt."""
    return digest([dict(message) for message in item.problem.prompt])


def rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, row) for every line of a JSON-lines file; nothing where the file does not exist."""
    return iter_json_lines(path) if path.exists() else iter(())
