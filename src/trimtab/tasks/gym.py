"""The procedural tasks of reasoning-gym: a hundred kinds, each with its own checker.

reasoning-gym draws problem i of seed s from the stream s + i, so neighbouring seeds share nearly all problems. Here
every task has streams of its own, and a problem's text decides whether it is for training or for testing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, get_args

from trimtab.tasks.problems import Part, Problem, check_number, optional_module, part_of, stream_seed, user

SUFFIX = "\nPut your final answer within \\boxed{}."
TEST_SHARE = 2  # half of all texts: reasoning-gym never runs out, and a draw is dear
DRAWS = 64

_CODE = "its checker runs the answer as code"
_TIME = "its checker can be made to run for hours"
_HASH = "its problems differ from process to process"

# Found by reading and running reasoning-gym 0.1.25.
UNSUITABLE: Mapping[str, str] = {
    "boxnet": _TIME,
    "codeio": _TIME,
    "composite": "it mixes other kinds; name those instead",
    "game_of_life_halting": "its checker accepts any answer",
    "intermediate_integration": _CODE,
    "isomorphic_strings": _HASH,
    "knight_swap": _HASH,
    "polynomial_multiplication": _CODE,
    "propositional_logic": _TIME,
    "puzzle24": "its checker does not look at the puzzle's numbers",
    "ransom_note": _HASH,
    "simple_integration": _CODE,
    "time_intervals": "its checker gives near misses nearly full marks",
    "word_ladder": _HASH,
}


@dataclass(frozen=True)
class GymTask:
    """One kind of task, e.g. `countdown`; `options` go to its generator."""

    kind: str
    size: int = 10_000
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    part: Part = "train"

    def __post_init__(self) -> None:
        if self.part not in get_args(Part):
            raise ValueError(f"{self.name}: part is {self.part!r}; it is one of {', '.join(get_args(Part))}")
        if self.size < 1:
            raise ValueError(f"{self.name}: size is {self.size}; it is at least 1")
        self._dataset(0)  # a wrong kind or option is an error now, not at the first problem

    @property
    def name(self) -> str:
        """The kind, under reasoning-gym's name."""
        return f"gym/{self.kind}"

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> Problem:
        check_number(number, self.size)
        for draw in range(DRAWS):
            entry = self._dataset(draw)[number]
            if part_of(entry["question"], TEST_SHARE) == self.part:
                return self._problem(entry)
        raise ValueError(f"{self.name} has no {self.part} problem among {DRAWS} draws: its options leave too few")

    def _problem(self, entry: Mapping[str, Any]) -> Problem:
        answer = "" if entry["answer"] is None else str(entry["answer"])  # some puzzles have a checker alone
        extra = {"entry": entry, "options": dict(self.options)}
        return Problem(user(entry["question"] + SUFFIX), answer, f"gym:{self.kind}", self.name, extra=extra)

    def _dataset(self, draw: int) -> Any:
        seed = stream_seed("gym", self.kind, self.seed, self.part, draw) % 2**31
        return gym_dataset(self.kind, self.options, self.size, seed)


def gym_dataset(kind: str, options: Mapping[str, Any], size: int = 1, seed: int = 0) -> Any:
    """reasoning-gym's own data set of a kind: it makes entries by index, and scores answers to them."""
    if kind in UNSUITABLE:
        raise ValueError(f"reasoning-gym's {kind!r} is not fit for training: {UNSUITABLE[kind]}")
    try:
        written = json.dumps(dict(options), sort_keys=True)
    except TypeError as error:
        raise ValueError(f"reasoning-gym's {kind!r}: options must be plain values, as in TOML ({error})") from None
    return _gym_dataset(kind, written, size, seed)


@lru_cache(maxsize=64)
def _gym_dataset(kind: str, options: str, size: int, seed: int) -> Any:
    gym = optional_module("reasoning_gym", f"the task gym:{kind}", "reasoning-gym")
    known = optional_module("reasoning_gym.factory", f"the task gym:{kind}", "reasoning-gym").DATASETS
    if kind not in known:
        kinds = ", ".join(sorted(known.keys() - UNSUITABLE.keys()))
        raise ValueError(f"reasoning-gym has no task {kind!r}; it has {kinds}")
    try:
        return gym.create_dataset(kind, size=size, seed=seed, **json.loads(options))
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"reasoning-gym cannot make {kind!r} with the options {options}: {error}") from None
