"""What an evaluation has to sample, and the interface of what samples it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

from trimtab.evaluate.folder import Generation, SampleKey
from trimtab.tasks import BenchmarkProblem


@dataclass(frozen=True)
class GenerationRequest:
    """A problem and the number of samples to generate for it."""

    item: BenchmarkProblem
    samples: int

    def sample_keys(self) -> list[SampleKey]:
        """Return the keys of its samples."""
        return [(self.item.benchmark, self.item.id, sample) for sample in range(self.samples)]


class ResponseGenerator(Protocol):
    """Generates samples in batches. A sample's text does not depend on which others are done already."""

    # A sampler whose rounding depends on the batch can reuse whole batches only; a server can reuse every sample.
    def reusable(self, requests: Sequence[GenerationRequest], done: AbstractSet[SampleKey]) -> set[SampleKey]:
        """Return which of the samples that are done can be kept."""
        ...

    def generate(
        self, requests: Sequence[GenerationRequest], done: AbstractSet[SampleKey]
    ) -> Iterator[list[Generation]]:
        """Yield batches of the samples that are not done yet."""
        ...
