"""The same number is the same problem in every process. Run as a script, this prints what the test compares."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import get_args

from trimtab.data import Arithmetic, GymTask, Problem, problem_index
from trimtab.data.arithmetic import Family


def problems() -> Iterator[Problem]:
    for family in get_args(Family):
        task = Arithmetic(family, form="instruct")
        yield from (task[number] for number in range(5))
    if importlib.util.find_spec("reasoning_gym"):
        for kind in ("countdown", "chain_sum", "maze"):
            yield GymTask(kind, size=10)[3]


def written() -> str:
    return "\n".join([*map(repr, problems()), *(str(problem_index(50, 7, position)) for position in range(150))])


def test_another_process_with_other_hashes_has_the_same_problems_in_the_same_order() -> None:
    other_hashes = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": other_hashes}
    there = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=True)
    assert there.stdout == written()


if __name__ == "__main__":
    sys.stdout.write(written())
