"""Problems (a prompt, its ground truth, and the rule that grades it) and tasks, which are sequences of problems.

The order in which a run sees the problems is a pure function of (seed, epoch, position), so a resumed run needs no
stored shuffle state.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import random
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Literal, Protocol

from trimtab.text import install_command

Message = Mapping[str, str]
Split = Literal["train", "test"]


@dataclass(frozen=True)
class Problem:
    """One prompt (chat messages), the answer it is graded against, and the name of the grading rule.

    A worked `solution` is a text, or messages of assistant and tool in turn: calls as the model is to write them, and
    what the tool said. `extra` holds what the rule needs (reasoning-gym's entry), the tools that the problem may use
    where not all of them (`tools`), and what records keep (a file's `extra_info`). `location` is the file and row that
    it comes from, if any, for error messages.
    """

    prompt: tuple[Message, ...]
    answer: str
    rule: str
    source: str
    solution: str | tuple[Message, ...] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    location: str = field(default="", compare=False)


class Task(Protocol):
    """A sequence of problems; the same index always returns the same problem."""

    @property
    def name(self) -> str:
        """The name in metrics and error messages."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Problem: ...


@dataclass(frozen=True)
class FixedTask:
    """A task whose problems are all in memory.

    `weights` has the number of problems and the weight of each of several files, in their order; without it every
    problem occurs once per epoch.
    """

    name: str
    problems: Sequence[Problem]
    weights: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        counts = prompts_per_epoch(self.weights)
        for (size, weight), count in zip(self.weights, counts, strict=True):
            if not size or not count:
                raise ValueError(
                    f"{self.name}: the file of weight {weight:g} has {size:,} problems and gets {count:,} of the "
                    f"{len(self):,} prompts of an epoch: each must be 1 or more"
                )

    def __len__(self) -> int:
        return len(self.problems)

    def __getitem__(self, index: int) -> Problem:
        return self.problems[check_index(index, len(self))]

    def without(self, dropped: Container[int]) -> FixedTask:
        """Return the task without the problems of these indices."""
        kept = [number for number in range(len(self)) if number not in dropped]
        starts = accumulate((size for size, _ in self.weights), initial=0)
        weights = [
            (sum(start <= number < start + size for number in kept), weight)
            for start, (size, weight) in zip(starts, self.weights, strict=False)
        ]
        return replace(self, problems=tuple(self.problems[number] for number in kept), weights=tuple(weights))


def check_index(index: int, size: int) -> int:
    """Return the index, or raise where a task of this size has no such problem; negative indices are refused."""
    if not 0 <= index < size:
        raise IndexError(f"there is no problem {index}: the task has problems 0 to {size - 1}")
    return index


def derive_seed(*parts: object) -> int:
    """Hash any values to a 63-bit seed; every random generator of a run is seeded by it."""
    # Not Python's hash(), which differs between processes; the separator keeps ("a", "b") and ("ab",) apart.
    digest = hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # fits a signed 64-bit integer, as torch's generators want


def split_of(text: str, test_one_in: int) -> Split:
    """Return the split of a generated problem by a hash of its text: one text in `test_one_in` is for testing."""
    # The text alone decides, so the splits never overlap, whatever seeds and sizes two tasks have.
    return "test" if derive_seed("part", text) % test_one_in == 0 else "train"


@lru_cache(maxsize=4)  # every position of an epoch reads one order; a batch may reach into the next
def _shuffled(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    indices = list(range(size))
    random.Random(derive_seed("order", seed, epoch)).shuffle(indices)
    return tuple(indices)


def problem_index(size: int, seed: int, position: int) -> int:
    """Return the index of the problem at a position of the endless training stream, reshuffled every epoch."""
    if size < 1 or position < 0:
        raise ValueError(f"a task of {size} problems has no position {position}: size starts at 1, positions at 0")
    epoch, offset = divmod(position, size)
    return _shuffled(size, seed, epoch)[offset]


def stream_index(task: Task, seed: int, position: int) -> int:
    """Return the index of a task's problem at a position of the training stream, by the weights of its files if any."""
    weights = task.weights if isinstance(task, FixedTask) else ()
    if not weights:
        return problem_index(len(task), seed, position)
    epoch, offset = divmod(position, len(task))
    return _mixed(weights, seed, epoch)[offset]


def prompts_per_epoch(weights: Sequence[tuple[int, float]]) -> list[int]:
    """Return how many prompts of an epoch come from each of several files, given their sizes and weights."""
    length, total = sum(size for size, _ in weights), math.fsum(weight for _, weight in weights)
    bounds = accumulate((length * weight / total for _, weight in weights), initial=0.0)
    return [round(high) - round(low) for low, high in pairwise(bounds)]


@lru_cache(maxsize=4)
def _mixed(weights: tuple[tuple[int, float], ...], seed: int, epoch: int) -> tuple[int, ...]:
    """Return the problems of an epoch: of each file its share, which goes on where the last epoch left that file."""
    chosen: list[int] = []
    start = 0
    for number, ((size, _), count) in enumerate(zip(weights, prompts_per_epoch(weights), strict=True)):
        order = derive_seed("file", seed, number)
        chosen += [start + problem_index(size, order, epoch * count + use) for use in range(count)]
        start += size
    random.Random(derive_seed("mix", seed, epoch)).shuffle(chosen)
    return tuple(chosen)


def user(text: str) -> tuple[Message, ...]:
    """Return a prompt of one user message."""
    return ({"role": "user", "content": text},)


def optional_module(name: str, purpose: str, package: str, extra: str = "") -> Any:
    """Import an optional dependency, or raise an error that says what needs it and what to install.

    `extra` is the extra of trimtab that brings the package, in the versions that work.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        install = install_command(package, extra=extra)
        raise ValueError(f"{purpose} needs the package {package}: {install}") from None
