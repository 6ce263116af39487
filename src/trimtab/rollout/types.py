"""What a sampler takes and gives. A faster path, or another engine, fits behind the same two types."""

from __future__ import annotations

import math
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

    def __post_init__(self) -> None:
        for name in ("samples", "max_new_tokens", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: it must be 1 or more")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature}: it must be 0 (greedy) or a number above")
        if not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(f"top_p={self.top_p}, top_k={self.top_k}: say 0 < top_p <= 1 and top_k >= 0")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed}: it must fit into 64 bits")


@dataclass(frozen=True)
class PromptTokens:
    """A prompt as token ids, and the number that names it in random streams."""

    ids: Sequence[int]
    number: int


def check_prompts(prompts: Sequence[PromptTokens], vocabulary: int) -> None:
    """Refuse what a model cannot read: on a GPU an unknown token ends the process instead of raising."""
    for number, prompt in enumerate(prompts):
        if not prompt.ids:
            raise ValueError(f"prompt {number} has no tokens: there is nothing to go on from")
        for token in (min(prompt.ids), max(prompt.ids)):
            if not 0 <= token < vocabulary:
                raise ValueError(
                    f"prompt {number} holds token {token}, but the model knows 0 to {vocabulary - 1}: "
                    "the tokenizer does not belong to it, or was given tokens of its own"
                )


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
