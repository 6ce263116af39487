"""Which problems come next: the interface, pools of problems by difficulty, and what checks one of the user's own.

Rank 0 chooses and observes, and tells the other ranks what it chose. Without a curriculum (`problems = "uniform"`) the
next problems follow from their numbers, and every rank knows them.
"""

from __future__ import annotations

import json
import operator
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from trimtab.data import Task, stream_index
from trimtab.own_parts import OwnPartError, errors_located, is_own, location
from trimtab.text import shown
from trimtab.trainer.config import POOLS, Config, CurriculumConfig, RewardConfig, check_own_curriculum
from trimtab.trainer.train.gates import ROUNDING, relative_reward

UNSEEN, HARD, NORMAL, EASY, SOLVED = POOLS
SEEN_POOLS = (HARD, NORMAL, EASY, SOLVED)
MOST_SEEN = 40_000  # problems that are kept in pools: of more, a checkpoint's state would be too large
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio
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


@dataclass
class DifficultyPools:
    """Pools of problems by difficulty: `choose` takes the next prompts from them by shares.

    A problem is in the pool of its latest group's mean reward, behind those that were tried after it. A pool gives the
    problem that was tried longest ago. Problems not seen yet come in the order of the uniform stream.
    """

    task: Task
    seed: int
    config: CurriculumConfig
    rewards: RewardConfig
    # In each pool the problems in the order in which they were tried, the latest last.
    pools: dict[str, dict[int, None]] = field(default_factory=lambda: {name: {} for name in SEEN_POOLS})
    position: int = 0  # in the stream, where the next unseen problem is looked for
    _again: list[bool] = field(default_factory=list)  # whether problems that were solved are solved again

    def choose(self, numbers: range) -> list[int]:
        """Return the index of a problem for each of these numbers of prompts: different ones as far as there are."""
        waiting = {name: deque(islice(pool, len(numbers))) for name, pool in self.pools.items()}
        unseen = self._unseen(len(numbers))
        waiting[UNSEEN] = deque(unseen)
        chosen = list[int]()
        for number in numbers:
            filled = [name for name in POOLS if waiting[name]]
            if not filled:
                break
            chosen.append(waiting[self._pool_at(number, filled)].popleft())
        if waiting[UNSEEN]:
            self.position = unseen[waiting[UNSEEN][0]]
        elif unseen:
            self.position = max(unseen.values()) + 1
        # With partial rollouts, others are chosen before these are observed.
        for index in chosen:
            if (pool := self.pool_of(index)) != UNSEEN:
                self.pools[pool][index] = self.pools[pool].pop(index)
        # A task may have fewer problems than there are prompts.
        return [chosen[n % len(chosen)] for n in range(len(numbers))]

    def observe(self, groups: Sequence[tuple[int, float | None]]) -> None:
        """Move problems to the ends of the pools of their groups' mean rewards."""
        for index, mean in groups:
            before = self.pool_of(index)
            after = before if mean is None else self._pool_for(mean)
            if before == SOLVED and mean is not None:
                self._again.append(after == SOLVED)
            if before != UNSEEN:
                del self.pools[before][index]
            if after != UNSEEN:
                self.pools[after][index] = None
        while sum(map(len, self.pools.values())) > MOST_SEEN:
            largest = max(self.pools.values(), key=len)
            del largest[next(iter(largest))]

    def pool_of(self, index: int) -> str:
        """Return the name of a problem's pool."""
        return next((name for name, pool in self.pools.items() if index in pool), UNSEEN)

    def metrics(self) -> dict[str, float]:
        """Return how many problems each pool has, and how many solved ones were solved again since the last call."""
        again, self._again = self._again, []
        counts = {name: len(pool) for name, pool in self.pools.items()}
        counts[UNSEEN] = len(self.task) - sum(counts.values())
        metrics: dict[str, float] = {f"curriculum/pool_{name}": counts[name] for name in POOLS}
        return metrics | ({"curriculum/still_solved_share": sum(again) / len(again)} if again else {})

    def state_dict(self) -> dict[str, Any]:
        """Return the pools, and where the next unseen problem is looked for."""
        return {"position": self.position, "pools": {name: list(pool) for name, pool in self.pools.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; one that is not valid raises ValueError."""
        position, pools = state["position"], state["pools"]
        if type(position) is not int or not 0 <= position < 10**18 or set(pools) != {*SEEN_POOLS}:
            raise ValueError(f"the curriculum's position is {shown(position)}, its pools are {shown(list(pools))}")
        seen = [index for name in SEEN_POOLS for index in pools[name]]
        wrong = [index for index in seen if type(index) is not int or not 0 <= index < len(self.task)]
        if wrong or len({*seen}) < len(seen) or len(seen) > MOST_SEEN:
            raise ValueError(f"the curriculum's problems are not those of the task: {shown(wrong[:1] or len(seen))}")
        self.pools = {name: dict.fromkeys(pools[name]) for name in SEEN_POOLS}
        self.position = position

    def _unseen(self, count: int) -> dict[int, int]:
        """Return up to so many problems in no pool, each with its position in the stream."""
        found: dict[int, int] = {}
        if sum(map(len, self.pools.values())) >= len(self.task):
            return found
        # To the end of the next epoch: what the present one has passed comes in that.
        end = (self.position // len(self.task) + 2) * len(self.task)
        for position in range(self.position, end):
            index = stream_index(self.task, self.seed, position)
            if index not in found and self.pool_of(index) == UNSEEN:
                found[index] = position
                if len(found) == count:
                    return found
        if not found:  # epochs need not have all problems of files with weights
            self.position = end
        return found

    def _pool_at(self, number: int, filled: Sequence[str]) -> str:
        """Return the pool of a prompt's number: any stretch of numbers is divided by the shares."""
        shares = {name: getattr(self.config, f"{name}_share") for name in filled}
        if not any(shares.values()):
            shares = dict.fromkeys(filled, 1.0)
        # Multiples of the golden ratio, without their whole parts, fill a line evenly: no state, and little chance.
        point = (number * GOLDEN % 2**64) / 2**64 * sum(shares.values())
        for name, share in shares.items():
            if point < share:
                return name
            point -= share
        return next(name for name in reversed(filled) if shares[name])  # by rounding

    def _pool_for(self, mean: float) -> str:
        """Return the pool of a problem whose latest group has this mean reward."""
        score, config = relative_reward(mean, self.rewards), self.config
        if score <= config.max_hard + ROUNDING:
            return HARD
        if score < config.min_easy - ROUNDING:
            return NORMAL
        return EASY if score < config.min_solved - ROUNDING else SOLVED
