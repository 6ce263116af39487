"""Which problems come next: the interface, and what checks one of the user's own.

Rank 0 chooses and observes, and tells the other ranks what it chose. Without a curriculum (`problems = "uniform"`) the
next problems follow from their numbers alone, and every rank knows them.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from trimtab.data import Task
from trimtab.own_parts import OwnPartError, errors_located, is_own, location
from trimtab.text import shown
from trimtab.trainer.config import Config, check_own_curriculum
from trimtab.trainer.train.difficulty_pools import DifficultyPools

MAX_STATE = 1 << 19  # characters of JSON; a checkpoint's state may have twice as many

# The mean reward of a problem's group, by the problem's index; None if all of the group is excluded.
GroupMeans = Sequence[tuple[int, float | None]]


class Curriculum(Protocol):
    """What chooses the next problems of a run."""

    def choose(self, numbers: range) -> Sequence[int]:
        """Return the index of a problem for each of these numbers of prompts."""
        ...

    def observe(self, groups: GroupMeans) -> None:
        """Look at groups that were sampled, also those that are not trained on."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as JSON has it."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; one that is not valid raises ValueError."""
        ...


def build_curriculum(config: Config, task: Task) -> Curriculum | None:
    """Build the curriculum of a recipe; None for the uniform stream of problems."""
    section = config.curriculum
    if section.problems == "pools":
        return DifficultyPools(task, config.run.seed, section, config.reward)
    if not is_own(section.problems):
        return None
    build = check_own_curriculum(section.problems, section.problems_options)
    with errors_located(section.problems, build):
        part = build(task, config.run.seed, **section.problems_options)
    return OwnCurriculum(section.problems, part, len(task))


@dataclass
class OwnCurriculum:
    """A curriculum of the user's own; what it returns is checked. Only `choose` is needed, if it has no state."""

    name: str
    part: Any
    size: int

    def __post_init__(self) -> None:
        if not self._has("choose"):
            self._refuse("it has no method choose(numbers)")
        if self._has("observe") and not (self._has("state_dict") and self._has("load_state_dict")):
            self._refuse("it observes groups, but a resumed run would forget them: add state_dict and load_state_dict")
        if self._has("state_dict") != self._has("load_state_dict"):
            self._refuse("state_dict and load_state_dict go together")

    def choose(self, numbers: range) -> Sequence[int]:
        """Return the index of a problem for each of these numbers of prompts."""
        with errors_located(self.name, type(self.part)):
            chosen = list(islice(self.part.choose(numbers), len(numbers) + 1))
        if len(chosen) != len(numbers):
            found = "more" if len(chosen) > len(numbers) else len(chosen)
            self._refuse(f"choose returned {found} problems for {len(numbers)} numbers")
        return [self._index(each) for each in chosen]

    def observe(self, groups: GroupMeans) -> None:
        """Show it groups that were sampled."""
        if self._has("observe"):
            with errors_located(self.name, type(self.part)):
                self.part.observe(list(groups))

    def metrics(self) -> dict[str, float]:
        """Return no metrics."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return its state, which must be the same once it was written as JSON and read again."""
        if not self._has("state_dict"):
            return {}
        with errors_located(self.name, type(self.part)):
            state = self.part.state_dict()
            text = json.dumps(state, allow_nan=False)
            copy = json.loads(text)
        if not isinstance(state, dict) or copy != state:
            self._refuse(
                f"state_dict returned {shown(state)}: JSON keeps tables with texts as keys, lists, texts and numbers"
            )
        if len(text) > MAX_STATE:
            self._refuse(f"state_dict returned {len(text):,} characters of JSON: a checkpoint takes {MAX_STATE:,}")
        # A copy: it may change its own in the next step.
        kept: dict[str, Any] = copy
        return kept

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        if self._has("load_state_dict"):
            with errors_located(self.name, type(self.part)):
                self.part.load_state_dict(dict(state))

    def _has(self, method: str) -> bool:
        return callable(getattr(self.part, method, None))

    def _index(self, value: Any) -> int:
        try:
            index = operator.index(value)
        except TypeError:
            index = -1
        if isinstance(value, bool) or not 0 <= index < self.size:
            self._refuse(f"choose returned {shown(value)}: problems are numbered 0 to {self.size - 1:,}")
        return index

    def _refuse(self, problem: str) -> None:
        raise OwnPartError(f"{self.name}: {location(type(self.part))}: {problem}")
