"""A response as it is handed to a rule: with its answer, and what is known of it and its problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trimtab.data import Problem

# What a rule of the user's own may ask for by keyword, beside response, answer and extra.
FACTS = ("prompt", "source", "tokens", "finished")


@dataclass(frozen=True)
class Submission:
    """A response to grade; `tokens` is its length and `finished` whether it ended by itself, where they are known."""

    response: str
    answer: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    prompt: Sequence[Mapping[str, str]] = ()
    source: str = ""
    tokens: int | None = None
    finished: bool | None = None
    location: str = ""

    @staticmethod
    def of(response: str, problem: Problem, tokens: int | None = None, finished: bool | None = None) -> Submission:
        """Return the submission of a response to a problem."""
        prompt = [dict(message) for message in problem.prompt]
        return Submission(
            response, problem.answer, problem.extra, prompt, problem.source, tokens, finished, problem.location
        )

    def with_extra(self, extra: Mapping[str, Any]) -> Submission:
        """Return the submission with another `extra`."""
        return replace(self, extra=extra)

    @property
    def named(self) -> str:
        """Where it comes from and how it begins, for an error."""
        start = self.response[:60] + ("..." if len(self.response) > 60 else "")
        return f"{self.location + ', ' if self.location else ''}the response {start!r}"
