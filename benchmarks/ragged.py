"""Countdown of two to six numbers in written steps: most responses are short, and some are five times as long."""

from __future__ import annotations

import random
from typing import Annotated

from trimtab.data import Countdown, FixedTask, Split, TaskOption, derive_seed

MOST_NUMBERS = 6


def ragged_countdown(
    split: Split, size: Annotated[int, TaskOption("number of problems per epoch", 1, 1_000_000)] = 20_000
) -> FixedTask:
    """Return problems of which half have two numbers, a quarter three, and so on."""
    tasks = [Countdown(numbers=numbers, form="steps", size=size, split=split) for numbers in range(2, MOST_NUMBERS + 1)]
    problems = []
    for index in range(size):
        level = int(random.Random(derive_seed("ragged", split, index)).expovariate(0.7))  # half of them are 0
        problems.append(tasks[min(level, len(tasks) - 1)][index])
    return FixedTask("ragged-countdown", problems)
