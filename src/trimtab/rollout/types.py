"""What a sampler takes and gives. A faster path, or another engine, fits behind the same two types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class SamplingOptions:
    """How to draw: `seed` is the run's; a sample's random stream is that of (seed, step, prompt, sample)."""

    samples: int
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    batch: int = 1024


@dataclass(frozen=True)
class PromptTokens:
    """A prompt as token ids, and the number that names it in random streams."""

    ids: Sequence[int]
    number: int


@dataclass(frozen=True)
class Response:
    """A sampled response: its tokens, the log-probabilities it was drawn with, and whether it ended by itself."""

    tokens: list[int]
    logp: list[float]
    finished: bool
    prompt: int = 0
    sample: int = 0
    extra: dict[str, float] = field(default_factory=dict)


class Sampler(Protocol):
    """Draws responses. All samples of a prompt come back together, in order."""

    def sample(self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions) -> list[list[Response]]:
        """For every prompt, `options.samples` responses."""
        ...
