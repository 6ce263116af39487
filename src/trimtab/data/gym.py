"""The procedurally generated tasks of reasoning-gym: a hundred kinds, each with its own checker."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, get_args

from trimtab.data.problems import Problem, Split, check_index, derive_seed, optional_module, split_of, user
from trimtab.own_parts import Option

SUFFIX = "\nPut your final answer within \\boxed{}."
TEST_ONE_IN = 2  # half of all texts: problems are unlimited but slow to generate, so few should be rejected
MAX_ATTEMPTS = 64

_CODE = "its checker runs the answer as code"
_TIME = "its checker can be made to run for hours"
_HASH = "its problems differ from process to process"

# Found by reading and running reasoning-gym 0.1.25: checkers that a policy could exploit, and generators that are not
# reproducible.
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
    """Problems of one kind, e.g. `countdown`; `options` are passed to reasoning-gym's generator."""

    kind: str
    size: int = 10_000
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    split: Split = "train"

    def __post_init__(self) -> None:
        if self.split not in get_args(Split):
            raise ValueError(f"{self.name}: split is {self.split!r}; it is one of {', '.join(get_args(Split))}")
        if self.size < 1:
            raise ValueError(f"{self.name}: size is {self.size}; it is at least 1")
        self._dataset(0)  # a wrong kind or option is an error now, not at the first problem

    @property
    def name(self) -> str:
        """Return `gym/` and reasoning-gym's name of the kind."""
        return f"gym/{self.kind}"

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Problem:
        check_index(index, self.size)
        for attempt in range(MAX_ATTEMPTS):
            entry = self._dataset(attempt)[index]
            if split_of(entry["question"], TEST_ONE_IN) == self.split:
                return self._problem(entry)
        raise ValueError(f"{self.name} has no {self.split} problem in {MAX_ATTEMPTS} attempts: loosen its options")

    def _problem(self, entry: Mapping[str, Any]) -> Problem:
        # Some puzzles have a checker but no single answer.
        answer = "" if entry["answer"] is None else str(entry["answer"])
        extra = {"entry": entry, "options": dict(self.options)}
        return Problem(user(entry["question"] + SUFFIX), answer, f"gym:{self.kind}", self.name, extra=extra)

    def _dataset(self, attempt: int) -> Any:
        # reasoning-gym seeds problem i of seed s with s + i, so neighbouring seeds would share nearly all problems.
        seed = derive_seed("gym", self.kind, self.seed, self.split, attempt) % 2**31
        return gym_dataset(self.kind, self.options, self.size, seed)


def gym_task(
    kind: str,
    split: Split,
    size: Annotated[int, Option("number of problems per epoch", 1, 10_000_000)] = 10_000,
    options: Annotated[dict[str, Any], Option("options of the generator")] = {},  # noqa: B006  (never changed)
) -> GymTask:
    """Problems of one kind that reasoning-gym generates, graded by its own checker."""
    return GymTask(kind, size, options=options, split=split)


def gym_dataset(kind: str, options: Mapping[str, Any], size: int = 1, seed: int = 0) -> Any:
    """Return reasoning-gym's dataset of a kind, which generates entries by index and scores answers to them."""
    if kind in UNSUITABLE:
        raise ValueError(f"reasoning-gym's {kind!r} is not fit for training: {UNSUITABLE[kind]}")
    try:
        encoded = json.dumps(dict(options), sort_keys=True)  # hashable, for the cache
    except TypeError as error:
        raise ValueError(f"reasoning-gym's {kind!r}: options must be plain values, as in TOML ({error})") from None
    return _gym_dataset(kind, encoded, size, seed)


@lru_cache(maxsize=64)
def _gym_dataset(kind: str, options: str, size: int, seed: int) -> Any:
    gym = optional_module("reasoning_gym", f"the task gym:{kind}", "reasoning-gym", "gym")
    known = optional_module("reasoning_gym.factory", f"the task gym:{kind}", "reasoning-gym", "gym").DATASETS
    if kind not in known:
        kinds = ", ".join(sorted(known.keys() - UNSUITABLE.keys()))
        raise ValueError(f"reasoning-gym has no task {kind!r}; it has {kinds}")
    try:
        return gym.create_dataset(kind, size=size, seed=seed, **json.loads(options))
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"reasoning-gym cannot make {kind!r} with the options {options}: {error}") from None
