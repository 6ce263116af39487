"""What a task gives: problems with a prompt, an answer and, where there is one, a worked solution.

The order in which a run meets them is a pure function of (seed, epoch, position), so a resumed run needs no
memory of it.
"""

from __future__ import annotations

import hashlib
import importlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, Protocol

Message = Mapping[str, str]
Part = Literal["train", "test"]


@dataclass(frozen=True)
class Problem:
    """One prompt (chat messages), the answer it is graded against, and by which rule.

    `extra` is for the rule (reasoning-gym's entry) and for records (a file's `extra_info`).
    """

    prompt: tuple[Message, ...]
    answer: str
    rule: str
    source: str
    solution: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


class Task(Protocol):
    """Problems by number. A task is a value: the same number always gives the same problem."""

    @property
    def name(self) -> str:
        """What metrics and errors call it."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Problem: ...


@dataclass(frozen=True)
class FixedTask:
    """A task whose problems are all in memory."""

    name: str
    problems: Sequence[Problem]

    def __len__(self) -> int:
        return len(self.problems)

    def __getitem__(self, number: int) -> Problem:
        return self.problems[check_number(number, len(self))]


def check_number(number: int, size: int) -> int:
    """The number itself where a task of this size has it. Tasks do not count from the end."""
    if not 0 <= number < size:
        raise IndexError(f"there is no problem {number}: the task has problems 0 to {size - 1}")
    return number


def stream_seed(*parts: object) -> int:
    """A 63-bit number from any parts: the root of every random stream in a run."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def part_of(text: str, test_share: int) -> Part:
    """The part a generated problem belongs to, by its text alone: one text in `test_share` is for testing."""
    return "test" if stream_seed("part", text) % test_share == 0 else "train"


@lru_cache(maxsize=4)
def _order(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    numbers = list(range(size))
    random.Random(stream_seed("order", seed, epoch)).shuffle(numbers)
    return tuple(numbers)


def problem_number(size: int, seed: int, position: int) -> int:
    """Which problem is met at a position of the endless stream; every epoch has its own order."""
    if size < 1 or position < 0:
        raise ValueError(f"a task of {size} problems has no position {position}: size starts at 1, positions at 0")
    epoch, place = divmod(position, size)
    return _order(size, seed, epoch)[place]


def user(text: str) -> tuple[Message, ...]:
    """A prompt of one user message."""
    return ({"role": "user", "content": text},)


def optional_module(name: str, purpose: str, install: str) -> Any:
    """A module that trimtab does without until it is asked for; where it is missing, what to install."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise ValueError(f"{purpose} needs the package {install}: pip install {install}") from None
