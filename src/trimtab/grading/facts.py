"""What a rule of the user's own may ask for by keyword, beside response, answer and extra."""

from __future__ import annotations

from typing import Any

from trimtab.data import Sample

FACTS = ("prompt", "source", "tokens", "finished")


def facts(sample: Sample) -> dict[str, Any]:
    """Return what rules get of a sample by name; `tokens`, its length, and `finished` are None if they are unknown."""
    problem, response = sample.problem, sample.response
    return {
        "response": sample.text,
        "answer": problem.answer,
        "extra": problem.extra,
        "prompt": [dict(message) for message in problem.prompt],
        "source": problem.source,
        "tokens": None if response is None else response.num_sampled,
        "finished": None if response is None else response.finished,
    }
