"""What an evaluation has to draw, and what draws it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

from trimtab.evaluate.folder import Generation, Key
from trimtab.tasks import BenchmarkProblem


@dataclass(frozen=True)
class Job:
    """A question and how many samples of it are wanted."""

    question: BenchmarkProblem
    samples: int

    def names(self) -> list[Key]:
        """The names of its samples."""
        return [(self.question.benchmark, self.question.id, sample) for sample in range(self.samples)]


class Source(Protocol):
    """Draws samples, in batches. What it draws does not depend on what is done already."""

    def kept(self, jobs: Sequence[Job], done: AbstractSet[Key]) -> set[Key]:
        """Which of the samples that are done can stay."""
        ...

    def draw(self, jobs: Sequence[Job], done: AbstractSet[Key]) -> Iterator[list[Generation]]:
        """Batches of the samples that are not done yet."""
        ...
