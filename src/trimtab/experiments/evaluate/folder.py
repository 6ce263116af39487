"""The folder of an evaluation: settings, problems, every generation, the verdicts on them, and the result.

Generations are only appended, a batch at a time with one write and one fsync; a torn last line of a killed process is
cut off. So an evaluation can be resumed, and responses can be graded again without sampling.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # Pydantic takes the standard library's only from Python 3.12 on

from trimtab import failpoints
from trimtab.agents import Conversation
from trimtab.data import BenchmarkProblem, Problem, Sample
from trimtab.experiments.evaluate.settings import (
    EvalSettings,
    SampleKey,
    differences,
    problem_row,
    prompt_hash,
    settings_from,
)
from trimtab.files import (
    append_json_lines,
    cut_torn_line,
    iter_json_lines,
    require_empty,
    write_atomically,
    write_json_lines,
)
from trimtab.grading import verdict_of
from trimtab.text import shown

BASELINE = "against"  # the folder of the baseline in that of an evaluation
T = TypeVar("T")
Finite = Annotated[float, Field(allow_inf_nan=False)]

Batches = Generator[list["Generation"], None, None]


class _StoredMessage(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    role: str


class _StoredCall(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    outcome: str


def _check_reward(value: float | None) -> float | None:
    if value is not None:
        verdict_of(value)
    return value


class StoredConversation(TypedDict):
    """A conversation as a JSON object: what is read of it again, and more that is only kept."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    ended: str | None
    messages: list[_StoredMessage]
    calls: list[_StoredCall]
    reward: Annotated[float | None, AfterValidator(_check_reward)]
    error: str


def conversation_row(conversation: Conversation) -> Any:
    """Return a conversation as a `StoredConversation`."""
    row = asdict(conversation)
    return {key: row[key] for key in ("ended", "messages", "calls", "void_turns", "reward", "error")}


@dataclass(frozen=True)
class Generation:
    """One stored response. `failed` is the reason where there is none; `logp` and `entropy` are means per token.

    With tools `text` is the model's last message, which is graded, and `conversation` has all messages and calls.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    benchmark: str
    problem: str
    sample: Annotated[int, Field(strict=True, ge=0)]
    prompt_hash: str
    settings: str
    seed: int
    text: str = ""
    tokens: Annotated[int, Field(ge=0, le=10**15)] | Annotated[float, Field(ge=0, le=1e15)] | None = None
    finished: bool = True
    logp: Finite | None = None
    entropy: Finite | None = None
    failed: str | None = None
    conversation: StoredConversation | None = None

    @property
    def key(self) -> SampleKey:
        """Return which sample of which problem it is."""
        return self.benchmark, self.problem, self.sample

    def to_grade(self, problem: Problem) -> Sample:
        """Return what graders read of it: the text, and how the environment judged its conversation."""
        if (row := self.conversation) is None:
            return Sample(problem, self.text)
        judged = Conversation(ended=row["ended"], reward=row["reward"], error=row["error"])  # type: ignore[arg-type]
        return Sample(problem, self.text, conversation=judged)


def new_generation(item: BenchmarkProblem, sample: int, settings: EvalSettings, **known: Any) -> Generation:
    """Return a sample of a problem; `known` are the fields of `Generation` that the generator fills in."""
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

    def check(self) -> None:
        """Raise if the folder has something in it and is not an evaluation."""
        if (self.path / "settings.json").exists():
            try:
                self.settings()
            except ValueError as error:
                raise ValueError(f"{error}. Nothing was changed: choose another --out") from None
        else:
            baseline = EvalFolder(self.path / BASELINE)
            require_empty(self.path, [BASELINE] if (baseline.path / "settings.json").is_file() else [])

    def open(self, settings: EvalSettings, problems: Sequence[BenchmarkProblem]) -> None:
        """Start an evaluation, or resume one with the same settings; without any sample yet it starts afresh."""
        self.check()
        begun = self.generations.exists() and self.generations.stat().st_size > 0
        differ = differences(self.settings(), settings) if begun else []
        if differ:
            lines = "".join(f"\n  {line}" for line in differ)
            raise ValueError(f"{self.path} was made with other settings; choose another --out. They differ in:{lines}")
        self.path.mkdir(parents=True, exist_ok=True)
        # First, for by it the folder is known as an evaluation. Also when resumed: the settings that may differ are
        # those of the last process.
        write_atomically(self.path / "settings.json", json.dumps(settings.as_json(), indent=2) + "\n")
        if not begun:  # the problems of stored generations must not change under them
            write_json_lines(self.path / "problems.jsonl", map(problem_row, problems))

    def settings(self) -> EvalSettings:
        """Read the settings."""
        path = self.path / "settings.json"
        if not path.is_file():
            raise ValueError(f"{self.path} is not an evaluation: there is no settings.json in it")
        try:
            return settings_from(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} cannot be read: {error!s:.500}") from None

    def problems(self) -> list[BenchmarkProblem]:
        """Read the problems as they were when the evaluation started."""
        rule = self.settings().rule
        problems = []
        for location, row in rows(self.path / "problems.jsonl"):
            stored = parse_row(_PROBLEM, row, location, "problem")
            source = stored.source or stored.benchmark
            problem = Problem(tuple(stored.prompt), stored.answer, rule, source, extra=stored.extra)
            problems.append(BenchmarkProblem(stored.benchmark, stored.id, stored.location, problem))
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
            generation = parse_row(_GENERATION, row, location, "generation")
            if generation.settings != expected:
                raise ValueError(f"{location}: a generation of other settings ({generation.settings}, not {expected})")
            if generation.key in found:
                raise ValueError(f"{location}: sample {generation.sample} of {generation.problem} is there twice")
            found.add(generation.key)
            yield generation

    def append(self, generations: Sequence[Generation]) -> None:
        """Append a batch and wait until it is on the disk."""
        append_json_lines(self.generations, *map(_row, generations), durable=True)
        failpoints.failpoint("generations.written")

    def keep_only(self, generations: Iterable[Generation]) -> None:
        """Remove all other generations."""
        write_json_lines(self.generations, map(_row, generations))


def _row(generation: Generation) -> dict[str, Any]:
    row = asdict(generation)
    return row if row["conversation"] is not None else {k: v for k, v in row.items() if k != "conversation"}


@dataclass(frozen=True)
class _ProblemRow:
    benchmark: str
    id: str
    location: str
    prompt: list[dict[str, str]]
    answer: str
    source: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


_GENERATION, _PROBLEM = TypeAdapter(Generation), TypeAdapter(_ProblemRow)


def parse_row(adapter: TypeAdapter[T], row: Any, location: str, what: str) -> T:
    """Return a stored row as the adapter's type; one that is none raises ValueError with its location."""
    try:
        return adapter.validate_python(row)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(
            f"{location}: not a {what} (`{where:.100}` is {shown(first['input'])}: {first['msg']})"
        ) from None


def rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, row) for every line of a JSON-lines file; nothing where the file does not exist."""
    if not path.is_file() and path.exists():  # reading a pipe would block
        raise ValueError(f"{path} is not a regular file")
    return iter_json_lines(path) if path.exists() else iter(())
